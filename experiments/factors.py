"""Largest factors by which one system is better than another, over several loads."""

from collections.abc import Mapping, Sequence

from experiments.result import Value

Metrics = Mapping[str, Value]


def largest_factors(pairs: Sequence[tuple[Metrics, Metrics]], names: Mapping[str, str]) -> dict[str, Value]:
    """The largest of each factor over pairs of metrics (theirs, ours) under the same load.

    names: by factor, the metric, of which less is better. ``attainment_factor`` is always included; of
    ``slo_attainment`` more is better.
    """
    found: dict[str, Value] = {
        factor: max(_number(theirs[metric]) / _number(mine[metric]) for theirs, mine in pairs)
        for factor, metric in names.items()
    }
    found["attainment_factor"] = max(
        _number(mine["slo_attainment"]) / max(_number(theirs["slo_attainment"]), 1e-3)
        for theirs, mine in pairs
    )
    return found


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)
