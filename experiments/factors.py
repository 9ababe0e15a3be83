"""How many times better one system is than another."""

from collections.abc import Mapping, Sequence

from experiments.result import Value

Metrics = Mapping[str, Value]


def largest_factors(pairs: Sequence[tuple[Metrics, Metrics]], names: Mapping[str, str]) -> dict[str, Value]:
    """Of (theirs, ours) under the same loads: each factor where it is largest.

    names: by factor, the metric, of which less is better. ``slo_attainment``, of which more is better, is
    always there, and gives ``attainment_factor``.
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
