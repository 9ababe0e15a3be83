"""What a finished batch was spent on."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.static.batching.types import StaticBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAccount:
    """Tokens of one served batch (SCLS, sections 2.4 and 5.2); sums over batches are meaningful."""

    pad_tokens: int
    """Input positions that hold no token of their request: sum of (longest input - own input).

    They stay in the KV cache and are attended (masked) at every iteration, but count once per batch.
    """
    invalid_tokens: int
    """Generated for requests that had ended already: sum of (iterations run - own output)."""
    useful_tokens: int
    """Generated for requests that had not ended; each request's last token is among them."""
    prefilled_tokens: int
    """Input tokens, pads left out."""
    recomputed_tokens: int
    """Input tokens of requests that had been served before, whose prefill is done again."""


def account(batch: StaticBatch, outputs: Sequence[int], iterations_run: int) -> BatchAccount:
    """What ``batch`` was spent on.

    outputs: tokens that each request produced up to its end (its last one included), or up to the end of the
    batch; in the order of ``batch.requests``. iterations_run: tokens generated for every row, fewer than
    ``batch.iterations`` where all requests ended early.

    Raises:
        ValueError: the numbers do not belong to such a batch.
    """
    if len(outputs) != len(batch):
        raise ValueError(f"a batch of {len(batch)} requests has as many outputs, got {len(outputs)}")
    if not 0 <= iterations_run <= batch.iterations:
        raise ValueError(f"iterations run must be in 0..{batch.iterations}, got {iterations_run}")
    for request, output in zip(batch.requests, outputs, strict=True):
        most = min(iterations_run, request.remaining)
        if not 0 <= output <= most:
            raise ValueError(f"output of request {request.id!r} must be in 0..{most}, got {output}")
    prefilled = sum(request.tokens for request in batch.requests)
    useful = sum(outputs)
    return BatchAccount(
        pad_tokens=len(batch) * batch.input_tokens - prefilled,
        invalid_tokens=len(batch) * iterations_run - useful,
        useful_tokens=useful,
        prefilled_tokens=prefilled,
        recomputed_tokens=sum(request.tokens for request in batch.requests if request.slices),
    )
