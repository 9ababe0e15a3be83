"""GraphCapturers without a GPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shoal.execute.cuda_graphs import CapturedGraph

_AT_ONCE = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
"""Begins of names of torch's operations that wait for the device."""


class FakeCapturer:
    """Replays work by calling it again. Captures raise ``errors`` first."""

    def __init__(self, *errors: Exception) -> None:
        self.tried = self.replayed = 0
        """Numbers of captures that were tried, and of replays."""
        self._errors = list(errors)

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        self.tried += 1
        if self._errors:
            raise self._errors.pop(0)
        output = compute()
        address = output.data_ptr()

        def replay() -> None:
            self.replayed += 1
            output.fill_(torch.nan)
            assert compute().data_ptr() == address, "a graph always writes to the same address"

        return CapturedGraph(replay, output)


class RecordingCapturer:
    """Records torch's operations and the launches of interpreted kernels, and does these again.

    So, as in a CUDA graph, all numbers that come from the host are those of the capture, and all tensors are
    at the same addresses. A replay begins with tensors full of NaN, but for those that were there before the
    capture. Work that waits for the device cannot be captured.
    """

    def __init__(self) -> None:
        self.tried = self.replayed = 0

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        from triton.runtime.interpreter import GridExecutor

        self.tried += 1
        compute()
        recorder = _Recorder()
        launch = GridExecutor.__call__

        def recorded_launch(grid: Any, *arguments: Any, **keywords: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    launch(grid, *arguments, **keywords)

            recorder.work.append(again)
            again()

        with pytest.MonkeyPatch.context() as patch, recorder:
            patch.setattr(GridExecutor, "__call__", recorded_launch)
            output = compute()

        def replay() -> None:
            self.replayed += 1
            recorder.replay()

        return CapturedGraph(replay, output)


@dataclass
class _Operation:
    function: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: list[torch.Tensor]
    """Tensors that it allocates."""

    def __call__(self) -> None:
        found = tree_leaves(self.function(*self.arguments, **self.keywords))
        for result, new in zip(self.results, found, strict=False):
            result.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []
        self._allocated: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(_AT_ONCE):
            raise RuntimeError(f"{name} waits for the device")
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name.startswith("index") and any(each.dtype == torch.bool for each in given[1:]):
            raise RuntimeError("an index of booleans waits for the device")
        found = func(*args, **(kwargs or {}))
        results = [each for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        if {_memory(each) for each in results} & {_memory(each) for each in given}:
            results = []  # views, and what is changed in place
        self.work.append(_Operation(func, args, kwargs or {}, results))
        self._allocated += results
        return found

    def replay(self) -> None:
        for each in self._allocated:
            each.fill_(torch.nan if each.is_floating_point() else torch.iinfo(torch.int8).max)
        for work in self.work:
            work()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
