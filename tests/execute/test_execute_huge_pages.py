"""Buffers in huge pages, where the system has them."""

import ctypes
import mmap
import os
import platform
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shoal.execute import huge_pages
from shoal.execute.huge_pages import PAGE, HugePages, huge_empty, prefault

pytestmark = pytest.mark.without_native


def advised_bytes(buffer: torch.Tensor) -> int:
    """Size of a buffer that was advised to be in huge pages."""
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


def test_tensors_are_copied_contiguously() -> None:
    pages = HugePages()
    tensors = [torch.arange(5), torch.randn(3, 7).bfloat16(), torch.randn(64)]
    copies = [pages.put(tensor) for tensor in tensors]
    tensors_and_copies = zip(tensors, copies, strict=True)
    assert all(torch.equal(tensor, copy) for tensor, copy in tensors_and_copies)
    assert [copy.data_ptr() - copies[0].data_ptr() for copy in copies] == [0, 64, 128]


def resident_pages(memory: torch.Tensor) -> int:
    pages = ctypes.create_string_buffer(-(-memory.nbytes // mmap.PAGESIZE))
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, pages) == 0
    return sum(byte & 1 for byte in pages.raw)


def can_prefault() -> bool:
    page = huge_empty(PAGE)
    return huge_pages.advise(page.data_ptr(), PAGE, huge_pages._MADV_POPULATE_WRITE)


def test_prefaulted_memory_is_resident_and_unchanged() -> None:
    if not can_prefault():
        pytest.skip("this system cannot take pages ahead")
    size = 3 * PAGE + 5
    fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(fresh, dtype=torch.uint8)
    buffer[: PAGE + 3] = 7
    buffer[-1] = 9
    every_page = -(-size // mmap.PAGESIZE)
    assert resident_pages(buffer) < every_page
    thread = prefault(buffer)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert resident_pages(buffer) == every_page
    assert (buffer[: PAGE + 3] == 7).all()
    assert buffer[-1] == 9


def test_prefaulting_ends_when_the_memory_has_no_references(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []
    held, released = [huge_empty(4 * PAGE)], threading.Event()

    def advise(address: int, num_bytes: int, advice: int) -> bool:
        advised.append(num_bytes)
        return released.wait(timeout=60)

    monkeypatch.setattr(huge_pages, "advise", advise)
    thread = prefault(held[0])
    held.clear()
    released.set()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert advised == [PAGE]


def test_prefaulting_ends_if_the_system_does_not_support_it(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []

    def advise(address: int, num_bytes: int, advice: int) -> bool:
        advised.append(num_bytes)
        return False

    buffer = huge_empty(4 * PAGE)
    monkeypatch.setattr(huge_pages, "advise", advise)
    thread = prefault(buffer)
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert advised == [PAGE]


def test_prefaulting_pauses_and_is_no_slower_than_others_while_it_holds_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priorities: list[int] = []
    pauses: list[float] = []

    def advise(address: int, num_bytes: int, advice: int) -> bool:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return True

    buffer = huge_empty(3 * PAGE)
    monkeypatch.setattr(huge_pages, "advise", advise)
    clock = iter([1.0, 1.5, 2.0, 2.25, 3.0, 3.0])
    monkeypatch.setattr(huge_pages, "time", SimpleNamespace(perf_counter=clock.__next__, sleep=pauses.append))
    prefault(buffer).join(timeout=60)
    assert priorities == [os.getpriority(os.PRIO_PROCESS, 0)] * 3
    assert pauses == [2.0, 1.0, 0.0]


@pytest.mark.slow
def test_a_process_may_exit_during_prefaulting() -> None:
    code = (
        "from shoal.execute import huge_pages\n"
        "huge_pages.PAGE = 4096\n"
        "memory = huge_pages.huge_empty(1 << 30)\n"
        "huge_pages.prefault(memory)\n"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
