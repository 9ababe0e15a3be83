"""Settings of memory take effect where the system has them."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.execute.heap import use_huge_pages

PROGRAM = """
import resource, torch
from shoal.execute.heap import keep_freed_memory
torch.set_num_threads(1)
assert keep_freed_memory()
x = torch.randn(2048, 576)
def step():
    y = x.pow(2) + x
    z = (y * 2).bfloat16()
    return (z * 3).float().mean()
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """The 20 steps touch some 100,000 pages; by default between 8,000 and 70,000 of them fault."""
    assert int(subprocess.check_output([sys.executable, "-c", PROGRAM])) < 4_000


def advised_bytes(buffer: torch.Tensor) -> int:
    """How much of a buffer the system gives huge pages, if it has any, as Linux tells."""
    start, end, advised = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            low, high = (int(part, 16) for part in name.split("-"))
        elif name == "VmFlags:" and "hg" in rest:
            advised += max(0, min(high, end) - max(low, start))
    return advised


@pytest.mark.skipif(platform.system() != "Linux", reason="only Linux has the setting")
def test_a_buffer_gets_huge_pages() -> None:
    buffer = torch.empty(9 << 20, dtype=torch.uint8)
    if not use_huge_pages(buffer):
        pytest.skip("this kernel has no huge pages")
    assert advised_bytes(buffer) >= buffer.nbytes - (8 << 10)


def test_buffers_without_a_whole_page_or_in_other_memory_stay_as_they_are() -> None:
    assert not use_huge_pages(torch.empty(100, dtype=torch.uint8))
    assert not use_huge_pages(torch.empty(1 << 20, dtype=torch.uint8, device="meta"))
