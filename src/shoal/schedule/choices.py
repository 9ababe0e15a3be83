"""Choices of one call: their prompt is computed by one of them, with whose blocks the others begin."""

from shoal.schedule.request_state import RequestState
from shoal.schedule.running_batch import RunningBatch


def prompt_holder(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """A running choice of the same call that has computed their prompt."""
    for choice in request.choices:
        if choice.seq_id >= 0 and batch.num_computed[batch.row_of(choice)] >= choice.num_prompt_tokens:
            return choice
    return None


def prompt_computer(request: RequestState, batch: RunningBatch) -> RequestState | None:
    """The running choice of the same call that computes their prompt; None if it has been, or nobody does."""
    if not request.choices or prompt_holder(request, batch) is not None:
        return None
    return next((choice for choice in request.choices if choice.seq_id >= 0), None)
