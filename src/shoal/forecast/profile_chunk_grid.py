"""Attention measured by one chunk and its context, as points of a table by prompt tokens and their key."""

from collections.abc import Mapping

from shoal.forecast.profile_prefill_keys import PrefillPoint, prefill_key

ChunkPoint = tuple[int, int, int, int]
"""One chunk of a prompt, the tokens computed before it, decoding rows, and the context of these."""


def by_prefill_key(measured: Mapping[ChunkPoint, float]) -> dict[PrefillPoint, float]:
    """Microseconds by key; ``measured`` has them by chunk and context, and points may be missing.

    Such a grid knows nothing of several chunks in one step, whose key is lower than that of a single chunk of
    as many tokens. So points are added for equal chunks without context: the first takes what it takes beside
    the decodes, and each other what it takes alone beyond the start of a kernel.
    """
    points: dict[PrefillPoint, float] = {}
    for (chunk, before, decodes, context), micros in measured.items():
        points[chunk, prefill_key([(chunk, before)]) if chunk else 0.0, decodes, context] = micros
    alone = {
        chunk: micros
        for (chunk, before, decodes, _), micros in measured.items()
        if chunk and not before and not decodes
    }
    start = min(alone.values(), default=0.0)
    chunks = sorted({chunk for chunk, *_ in measured if chunk})
    for (chunk, before, decodes, context), micros in measured.items():
        if chunk in alone and not before:
            for tokens in (tokens for tokens in chunks if tokens > chunk):
                others = (tokens / chunk - 1) * (alone[chunk] - start)
                points[tokens, prefill_key([(chunk, 0)]), decodes, context] = micros + others
    return points
