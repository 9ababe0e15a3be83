"""A GraphCapturer without a GPU."""

from collections.abc import Callable

import torch

from shoal.execute.cuda_graphs import CapturedGraph


class FakeCapturer:
    """Replays work by calling it again. Captures raise ``errors`` first."""

    def __init__(self, *errors: Exception) -> None:
        self.tried = 0
        """Number of captures that were tried."""
        self._errors = list(errors)

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        self.tried += 1
        if self._errors:
            raise self._errors.pop(0)
        output = compute()
        address = output.data_ptr()

        def replay() -> None:
            output.fill_(torch.nan)
            assert compute().data_ptr() == address, "a graph always writes to the same address"

        return CapturedGraph(replay, output)
