"""The heap setting takes effect where the C library has it."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.without_native

PROGRAM = """
import resource, torch
from shoal.execute.malloc import keep_freed_memory
torch.set_num_threads(1)
assert keep_freed_memory()
x = torch.randn(2048, 576)
def step():
    y = x.pow(2) + x
    z = (y * 2).bfloat16()
    return (z * 3).float().mean()
for _ in range(40):  # until the heap has settled
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_reused_without_page_faults() -> None:
    """The 20 steps touch some 100,000 pages; by default between 8,000 and 80,000 of them fault."""
    assert int(subprocess.check_output([sys.executable, "-c", PROGRAM])) < 4_000
