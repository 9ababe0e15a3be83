"""Graphs share memory as long as there are any, and errors leave nothing behind: with a fake of CUDA."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch

from shoal.execute.cuda_graphs import CudaGraphCapturer


class Graph:
    def replay(self) -> None:
        pass


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


class FakeCuda:
    """As much of ``torch.cuda`` as recording needs."""

    def __init__(self) -> None:
        self.current = self.main = Stream()
        self.memory: list[int] = []
        """Of each capture."""
        self._handles = count()

    def graph_pool_handle(self) -> int:
        return next(self._handles)

    @contextmanager
    def graph(self, graph: Graph, pool: int, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.memory.append(pool)
        self.current = Stream()
        yield
        self.current = self.main

    def set_stream(self, stream: Stream) -> None:
        self.current = stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("graph_pool_handle", "graph", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    replaced: dict[str, Any] = {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda: fake.current,
        "synchronize": lambda: None,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return fake


def test_graphs_share_memory_until_the_last_is_freed(cuda: FakeCuda) -> None:
    capturer = CudaGraphCapturer()
    output = torch.zeros(1)
    kept = [capturer.capture(lambda: output) for _ in range(3)]
    assert all(each.output is output for each in kept)
    del kept[1:]
    kept.append(capturer.capture(lambda: output))
    assert cuda.memory == [0, 0, 0, 0]
    kept.clear()
    gc.collect()
    capturer.capture(lambda: output)
    assert cuda.memory[-1] > 0


def test_a_failed_capture_restores_the_stream(cuda: FakeCuda) -> None:
    calls: list[int] = []

    def fail_when_captured() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not while a stream is captured")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="captured"):
        CudaGraphCapturer().capture(fail_when_captured)
    assert cuda.current is cuda.main
