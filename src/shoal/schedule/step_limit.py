"""Limit on the step size of a service after a failed step, and the suspects, which are tried separately."""

from collections.abc import Iterable

from shoal.core import StepPlan
from shoal.schedule.request_state import RequestState

TOKENS_PER_ROW = 16
"""Tokens that count as much as one row in the size of a step."""
_RESET_AFTER = 256
"""Steps without a failure, times the patience, after which the limit is removed."""


def step_size(plan: StepPlan) -> int:
    """The size of a step: its rows, or its tokens / ``TOKENS_PER_ROW`` if that is more.

    A step of size 1 cannot be made smaller: one request computes few tokens.
    """
    return max(len(plan.seq_ids), -(-sum(plan.new_tokens) // TOKENS_PER_ROW))


class StepLimit:
    """The limit on the steps of one service: ``max_tokens``, or less after a failure.

    A failed step sets the allowed size to half of its own; ``patience`` successful steps of that size double
    it again. If the larger size then fails, the patience doubles, so that a size too large for the device is
    tried ever more rarely. If a request fails alone, it was the reason itself, and the patience returns to 1.

    The requests of a failed step are *suspects* until a step with them succeeds. They are tried separately
    from other requests, so that one that always fails is found by halving.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._reset()

    def _reset(self) -> None:
        self._suspects: set[RequestState] = set()
        self._size: int | None = None
        self._patience = 1
        self._at_limit = 0  # steps of the allowed size since it was set
        self._since_failure = 0  # steps since the last failure
        self._doubled = False  # the size was doubled since the last failure

    @property
    def rows(self) -> int:
        """Limit on the rows of a step."""
        return self._max_tokens if self._size is None else min(self._max_tokens, self._size)

    @property
    def tokens(self) -> int:
        """Limit on the tokens of a step."""
        if self._size is None:
            return self._max_tokens
        return min(self._max_tokens, self._size * TOKENS_PER_ROW)

    @property
    def has_suspects(self) -> bool:
        """Whether any suspect is unfinished."""
        return any(not request.finished for request in self._suspects)

    def suspects(self) -> list[RequestState]:
        """Waiting suspects, in the order of the queue."""
        if not self._suspects:
            return []
        waiting = [request for request in self._suspects if request.seq_id < 0 and not request.finished]
        return sorted(waiting, key=lambda request: (request.rank, request.arrival_ns, request.number))

    def failed(self, plan: StepPlan, requests: Iterable[RequestState]) -> bool:
        """Record a failed step; returns whether its only request is the reason.

        requests: the step's unfinished requests.
        """
        size = step_size(plan)
        self._since_failure = self._at_limit = 0
        if size == 1:
            self._patience = 1
            self._suspects.difference_update(requests)
            return True
        if self._doubled:
            self._patience *= 2
            self._doubled = False
        self._size = size // 2
        self._suspects = {request for request in (*self._suspects, *requests) if not request.finished}
        return False

    def succeeded(self, plan: StepPlan, requests: Iterable[RequestState]) -> None:
        """Record a successful step."""
        if self._size is None:
            return
        self._suspects.difference_update(requests)
        self._since_failure += 1
        if self._since_failure >= _RESET_AFTER * self._patience:
            self._reset()
        elif step_size(plan) >= self._size:
            self._at_limit += 1
            if self._at_limit >= self._patience:
                self._size *= 2
                self._at_limit = 0
                self._doubled = True
