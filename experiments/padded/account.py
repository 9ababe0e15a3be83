"""Token accounting of a finished batch: useful, invalid, padding, prefilled and recomputed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.batches.requests import RequestBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAccount:
    """Tokens of one served batch (SCLS, sections 2.4 and 5.2); may be summed over batches."""

    pad_tokens: int
    """Padding: sum of (longest input - own input).

    It stays in the KV cache and is attended (masked) at every iteration, but counts once per batch.
    """
    invalid_tokens: int
    """Generated after the end of their request: sum of (iterations run - own output)."""
    useful_tokens: int
    """Generated up to the end of their request, including the last token."""
    prefilled_tokens: int
    """Input tokens without padding."""
    recomputed_tokens: int
    """Input tokens of requests that were in an earlier batch, which are prefilled again."""


def account(batch: RequestBatch, outputs: Sequence[int], iterations_run: int) -> BatchAccount:
    """Account for the tokens of ``batch``.

    outputs: number of tokens of each request up to its end (inclusive) or the end of the batch, in the order
    of ``batch.requests``. iterations_run: tokens generated for every row, fewer than ``batch.iterations`` if
    all requests ended early.

    Raises:
        ValueError: the numbers do not fit the batch.
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
