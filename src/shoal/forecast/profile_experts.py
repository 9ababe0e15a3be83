"""Times of a mixture-of-experts block by tokens, from times by tokens and activated experts."""

from collections.abc import Mapping

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.profile_files import Curve, ProfileFiles
from shoal.forecast.roofline import experts_touched

_DENSE_MLP = ("gate_up_proj", "act_fn", "down_proj")


def expert_block(files: ProfileFiles, model: ModelSpec, tokens: int) -> FloatArray:
    """Microseconds of one layer's experts and router at 0 .. ``tokens`` - 1 tokens; 0 in dense models.

    Each device holds an equal share of the experts and computes all tokens of the step. Tokens are assumed to
    choose experts independently and evenly, so that every device reads as many; a trained router prefers some
    and activates fewer. Raises ConfigError if tables and model do not fit together.
    """
    _check(files, model)
    if not files.experts:
        return np.zeros(tokens)
    touched = [experts_touched(model.experts, model.experts_per_token, count) for count in range(tokens)]
    return times_at(files.experts, np.array(touched) / files.tp)


def rank_experts(
    files: ProfileFiles, model: ModelSpec, ranks: int, imbalance: float, tokens: int
) -> FloatArray:
    """Microseconds of one layer's experts and router at 0 .. ``tokens`` - 1 tokens of ``ranks`` together.

    The busiest rank computes ``imbalance`` times an even share of them, with its share of the experts that
    all tokens touch: what was measured on one device, as many tokens with as many experts. Raises ConfigError
    as ``expert_block``.
    """
    _check(files, model)
    touched = [experts_touched(model.experts, model.experts_per_token, count) for count in range(tokens)]
    share = np.array([count * imbalance / ranks for count in range(tokens)])
    return times_at(files.experts, np.array(touched) / ranks, share)


def times_at(
    curves: Mapping[int, Curve], touched: FloatArray, tokens: FloatArray | None = None
) -> FloatArray:
    """Microseconds at ``tokens`` that activate ``touched`` experts, interpolated linearly.

    tokens: one for each of ``touched``; None: 0, 1, ... curves: by activated experts. Below the smallest
    measured number its times are taken; beyond the largest, times are extrapolated from the last two.
    """
    measured = np.array(sorted(curves), dtype=np.float64)
    places = np.arange(len(touched))
    times = np.array([curves[int(experts)].at_integers(len(touched) - 1) for experts in measured])
    if tokens is not None:
        times = np.array([np.interp(tokens, places, row) for row in times])
    if len(measured) == 1:
        only: FloatArray = times[0]
        return only
    i = np.clip(np.searchsorted(measured, touched, side="right") - 1, 0, len(measured) - 2)
    share = np.maximum((touched - measured[i]) / (measured[i + 1] - measured[i]), 0.0)
    low, high = times[i, places], times[i + 1, places]
    result: FloatArray = low + (high - low) * share
    return result


def _check(files: ProfileFiles, model: ModelSpec) -> None:
    if not files.experts:
        if model.experts:
            raise ConfigError(
                f"{files.folder} has no moe.csv, but the layers of {model.name} have {model.experts} "
                f"experts; measure them too, or say which model was measured"
            )
        return
    where = files.experts_file
    if not model.experts:
        raise ConfigError(
            f"{where} times layers with experts, but {model.name} has none; say which model was measured"
        )
    most = max(files.experts)
    if most * files.tp > model.experts:
        raise ConfigError(
            f"{where} has {most} activated experts on each of {files.tp} devices, but {model.name} has "
            f"{model.experts} in all; say which model was measured"
        )
    mixed = [name for name in _DENSE_MLP if name in files.dense]
    if mixed:
        raise ConfigError(
            f"{files.folder / 'dense.csv'} has {', '.join(mixed)} beside {where.name}: how many layers have "
            f"experts and how many have not is unknown. Only models whose layers are all alike can be timed"
        )
