"""Graphs share memory as long as there are any, and errors leave nothing behind: with a fake of CUDA."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch

from shoal.execute.cuda_graphs import CudaGraphCapturer, empty_cuda_cache

pytestmark = pytest.mark.without_native


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited_for.append(other)


class FakeCuda:
    """As much of ``torch.cuda`` as capturing needs."""

    def __init__(self) -> None:
        self.current = self.main = Stream()
        self.memory: list[int] = []
        """Pool of each capture."""
        self.streams: list[Stream] = []
        """Stream of each capture."""
        self.capturing = False
        self.errors: list[Exception] = []
        """Raised by the ends of captures."""
        self._handles = count()

    def graph_pool_handle(self) -> int:
        return next(self._handles)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()

    class Graph:
        def replay(self) -> None:
            pass

        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            assert fake.current is not fake.main, "work on the default stream cannot be captured"
            fake.memory.append(pool)
            fake.streams.append(fake.current)
            fake.capturing = True

        def capture_end(self) -> None:
            assert fake.capturing
            if fake.errors:
                raise fake.errors.pop()
            fake.capturing = False

    replaced: dict[str, Any] = {
        "graph_pool_handle": fake.graph_pool_handle,
        "CUDAGraph": Graph,
        "Stream": Stream,
        "stream": fake.stream,
        "current_stream": lambda: fake.current,
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


def test_captures_share_a_stream_and_are_ordered_with_other_work(cuda: FakeCuda) -> None:
    capturer = CudaGraphCapturer()
    for _ in range(2):
        capturer.capture(lambda: torch.zeros(1))
    side = cuda.streams[0]
    assert cuda.streams == [side, side]
    assert side.waited_for == [cuda.main, cuda.main]
    assert cuda.main.waited_for == [side, side]


def test_a_failed_capture_is_ended_and_restores_the_stream(cuda: FakeCuda) -> None:
    calls: list[int] = []

    def fail_when_captured() -> torch.Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("not while a stream is captured")
        return torch.zeros(1)

    with pytest.raises(RuntimeError, match="captured"):
        CudaGraphCapturer().capture(fail_when_captured)
    assert cuda.current is cuda.main
    assert not cuda.capturing
    assert cuda.main.waited_for == cuda.streams


def test_later_work_waits_for_that_before_an_error(cuda: FakeCuda) -> None:
    """It changes the buffers that the failed work still reads."""
    streams: list[Stream] = []

    def fail() -> torch.Tensor:
        streams.append(cuda.current)
        raise torch.OutOfMemoryError("it is large")

    with pytest.raises(torch.OutOfMemoryError):
        CudaGraphCapturer().capture(fail)
    assert cuda.current is cuda.main
    assert cuda.main.waited_for == streams


def test_a_capture_whose_end_fails_is_ended(cuda: FakeCuda) -> None:
    cuda.errors.append(RuntimeError("the capture was invalidated"))
    with pytest.raises(RuntimeError, match="invalidated"):
        CudaGraphCapturer().capture(lambda: torch.zeros(1))
    assert not cuda.capturing


def test_the_cache_is_not_emptied_during_a_capture(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread waits until the capture is over."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(cuda.capturing))
    other = threading.Thread(target=empty_cuda_cache)

    def compute() -> torch.Tensor:
        if cuda.capturing:
            other.start()
            other.join(0.05)
        return torch.zeros(1)

    CudaGraphCapturer().capture(compute)
    other.join()
    assert emptied == [False]
