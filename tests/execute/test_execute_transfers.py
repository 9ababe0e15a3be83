"""Host memory for copies to and from a GPU: with a fake of CUDA."""

from typing import Any

import pytest
import torch

from shoal.core import ConfigError
from shoal.execute.transfers import host_memory


class Library:
    def __init__(self, error: int = 0) -> None:
        self.registered: dict[int, int] = {}
        self._error = error

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self._error:
            self.registered[address] = num_bytes
        return self._error

    def cudaHostUnregister(self, address: int) -> None:
        del self.registered[address]


def test_memory_is_pinned_in_its_own_size_until_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: library)
    memory: Any = host_memory(5000, torch.device("cuda"))
    assert (memory.dtype, memory.shape) == (torch.uint8, (5000,))
    assert library.registered == {memory.data_ptr(): 5000}
    memory = None
    assert not library.registered


def test_a_cpu_needs_no_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("not on a CPU"))
    assert host_memory(5000, torch.device("cpu")).shape == (5000,)


def test_memory_that_cannot_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Library(error=2))
    with pytest.raises(ConfigError, match=r"kv_cache\.swap"):
        host_memory(5000, torch.device("cuda"))
