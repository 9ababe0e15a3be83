"""How large the steps of a service may be after one of them failed, and who is tried first."""

from collections.abc import Iterable

from shoal.core import StepPlan
from shoal.schedule.request_state import RequestState

TOKENS_PER_ROW = 16
"""In the size of a step, so many tokens count as much as one row."""
_CALM = 256
"""Times the patience: so many steps without a failure, and the limit is forgotten."""


def step_size(plan: StepPlan) -> int:
    """The size of a step: its rows, or its tokens in sixteens where these are more.

    At 1 it cannot be made smaller: one request computes few tokens.
    """
    return max(len(plan.seq_ids), -(-sum(plan.new_tokens) // TOKENS_PER_ROW))


class StepLimit:
    """The limit on the steps of one service: ``most_tokens``, or less after a failure.

    A step that fails halves the size allowed; so many steps of that size as ``patience`` says double it
    again. Where the larger size then fails, patience is doubled: a device that is too small for some size is
    asked for it ever more rarely. A request that fails alone was itself the reason: patience is 1 again.

    The requests of a failed step are *suspects* until a step with them succeeds. They are tried apart from
    all others, so that one that always fails is found by halving.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._forget()

    def _forget(self) -> None:
        self._suspects: set[RequestState] = set()
        self._size: int | None = None
        self._patience = 1
        self._at_limit = 0  # steps of the size allowed since it was set
        self._calm = 0  # steps since the last failure
        self._grown = False  # whether it was doubled since then

    @property
    def rows(self) -> int:
        """Most requests of a step."""
        return self._most_tokens if self._size is None else min(self._most_tokens, self._size)

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""
        if self._size is None:
            return self._most_tokens
        return min(self._most_tokens, self._size * TOKENS_PER_ROW)

    @property
    def has_suspects(self) -> bool:
        """Whether any of them is unfinished."""
        return any(not request.finished for request in self._suspects)

    def suspects(self) -> list[RequestState]:
        """Those of them who wait, in the order of the queue."""
        if not self._suspects:
            return []
        waiting = [request for request in self._suspects if request.seq_id < 0 and not request.finished]
        return sorted(waiting, key=lambda request: (request.rank, request.arrival_ns, request.number))

    def failed(self, plan: StepPlan, requests: Iterable[RequestState]) -> bool:
        """A step failed; whether that is because of the one request that it had.

        requests: of the step, those unfinished.
        """
        size = step_size(plan)
        self._calm = self._at_limit = 0
        if size == 1:
            self._patience = 1
            self._suspects.difference_update(requests)
            return True
        if self._grown:
            self._patience *= 2
            self._grown = False
        self._size = size // 2
        self._suspects = {request for request in (*self._suspects, *requests) if not request.finished}
        return False

    def succeeded(self, plan: StepPlan, requests: Iterable[RequestState]) -> None:
        """A step was made."""
        if self._size is None:
            return
        self._suspects.difference_update(requests)
        self._calm += 1
        if self._calm >= _CALM * self._patience:
            self._forget()
        elif step_size(plan) >= self._size:
            self._at_limit += 1
            if self._at_limit >= self._patience:
                self._size *= 2
                self._at_limit = 0
                self._grown = True
