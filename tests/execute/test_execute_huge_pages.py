"""Buffers in huge pages, where the system has them."""

import platform
from pathlib import Path

import pytest
import torch

from shoal.execute.huge_pages import PAGE, HugePages, huge_empty


def advised_bytes(buffer: torch.Tensor) -> int:
    """How much of a buffer Linux was asked to hold in huge pages."""
    start, end, advised = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if "-" in name and not name.endswith(":"):
            low, high = (int(part, 16) for part in name.split("-"))
        elif name == "VmFlags:" and "hg" in rest:
            advised += max(0, min(high, end) - max(low, start))
    return advised


def test_a_buffer_begins_with_a_page_and_is_advised() -> None:
    buffer = huge_empty(3 * PAGE + 5)
    assert buffer.shape == (3 * PAGE + 5,)
    assert buffer.data_ptr() % PAGE == 0
    if platform.system() != "Linux" or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no transparent huge pages")
    assert advised_bytes(buffer) >= 3 * PAGE


def test_tensors_are_copied_one_behind_the_other() -> None:
    pages = HugePages()
    tensors = [torch.arange(5), torch.randn(3, 7).bfloat16(), torch.randn(64)]
    copies = [pages.put(tensor) for tensor in tensors]
    tensors_and_copies = zip(tensors, copies, strict=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in tensors_and_copies)
    assert [copy.data_ptr() - copies[0].data_ptr() for copy in copies] == [0, 64, 128]
