"""Validation of an executor's step result, and its split by service."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from shoal.core import NO_TOKEN, StepPlan, StepResult

T = TypeVar("T")


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Raises ValueError if a result does not fit the plan."""
    wanted = len(plan.sampled)
    for tokens in result.tokens:
        if len(tokens) != wanted:
            raise ValueError(f"plan {plan.number} samples {wanted} tokens, got {len(tokens)}")
    if not 1 <= len(result.tokens) <= plan.iterations:
        raise ValueError(
            f"plan {plan.number} has up to {plan.iterations} tokens of a row, got {len(result.tokens)}"
        )
    most, times = len(result.tokens), len(result.durations_ns)  # tokens of a row, iterations
    if not (times == most or (result.counts is not None and 1 <= times <= most)):
        raise ValueError(f"plan {plan.number} has {most} tokens of a row, got {times} times")
    _check_postponed(plan, result)
    counts = result.counts
    if counts is not None and (len(counts) != wanted or not all(1 <= count <= most for count in counts)):
        raise ValueError(f"plan {plan.number} has 1 to {most} tokens of {wanted} rows, got counts {counts}")


def _check_postponed(plan: StepPlan, result: StepResult) -> None:
    """A postponed row has no token in the last iteration only, and no other failure."""
    for place in result.postponed:
        tokens = [row[place] for row in result.tokens] if 0 <= place < len(plan.sampled) else []
        if tokens.count(NO_TOKEN) != 1 or tokens[-1] != NO_TOKEN or place in result.failures:
            raise ValueError(f"plan {plan.number} cannot have postponed row {place} with tokens {tokens}")
    if result.postponed and result.counts is not None:
        raise ValueError(f"plan {plan.number} has postponed rows, and several tokens of an iteration")


def split_result(plan: StepPlan, result: StepResult) -> list[StepResult]:
    """The result of a co-batched plan for each of its services."""
    results = []
    for _, rows in plan.rows_by_service():
        first = bisect_left(plan.sampled, rows.start)
        own = slice(first, bisect_left(plan.sampled, rows.stop))
        results.append(
            replace(
                result,
                tokens=[tokens[own] for tokens in result.tokens],
                counts=None if result.counts is None else result.counts[own],
                logprobs=None if result.logprobs is None else [known[own] for known in result.logprobs],
                prompt_logprobs=_of_rows(result.prompt_logprobs, rows),
                embeddings=_of_rows(result.embeddings, rows),
                failures=_of_rows(result.failures, own),
                postponed=frozenset(_of_rows(dict.fromkeys(result.postponed), own)),
            )
        )
    return results


def _of_rows(entries: Mapping[int, T], rows: slice) -> dict[int, T]:
    """The entries of some rows, renumbered from the first of these."""
    return {row - rows.start: entry for row, entry in entries.items() if rows.start <= row < rows.stop}
