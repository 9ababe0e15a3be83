"""CapturedGraph work without a GPU."""

from collections.abc import Callable

import torch

from shoal.execute.cuda_graphs import CapturedGraph


class FakeRecorder:
    """Does recorded work by calling it again. Work that is not to be recorded raises ``errors`` first."""

    def __init__(self, *errors: Exception) -> None:
        self.tried = 0
        """How often something was to be recorded."""
        self._errors = list(errors)

    def capture(self, compute: Callable[[], torch.Tensor]) -> CapturedGraph:
        """See GraphCapturer."""
        self.tried += 1
        if self._errors:
            raise self._errors.pop(0)
        output = compute()
        place = output.data_ptr()

        def replay() -> None:
            output.fill_(torch.nan)
            assert compute().data_ptr() == place, "a graph always writes to the same place"

        return CapturedGraph(replay, output)
