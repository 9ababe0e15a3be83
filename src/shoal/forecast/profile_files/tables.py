"""Step times from tables of measured layer times: a layer's parts by tokens, attention by its shape."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.profile_files.attention import PrefillKeyTable
from shoal.forecast.profile_files.reading import (
    Curve,
    ProfileFiles,
    measured_device,
    measured_model,
    read_profile,
)
from shoal.forecast.roofline import experts_touched
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows
from shoal.forecast.tensor_parallel import RequestContext

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


_T = TypeVar("_T")

PER_STEP = frozenset({"embedding", "final_layernorm"})
"""Parts in ``dense.csv`` that run once in a step; all others run in each layer."""
REDUCTION = "all_reduce"
"""The row in ``dense.csv`` for one sum of a step's hidden states over all devices; see ``RequestContext``."""
TIMES_PER_LAYER = {"layernorm": 2}
"""Parts that run several times in a layer, such as before attention and before the MLP."""
LEAST_TOKENS = 8192
"""Times are computed beforehand for steps of at least so many tokens, however few were measured."""


class ProfileTimes:
    """Step times from tables of one model on one device."""

    def __init__(self, files: ProfileFiles, model: ModelSpec, link: Link | None = None) -> None:
        """model: says how many layers there are; the tables have the times of one. link: between the devices,
        if there are several; None: as measured, in rows ``all_reduce`` of ``dense.csv``.

        Raises ConfigError if only one of model and tables has experts.
        """
        tokens = token_range(files)
        exchange = _exchange(files, model, link)
        per_token = _sum(files.dense, tokens, model.layers)
        per_token += model.layers * expert_block(files, model, tokens)
        per_token += [
            1e6 * (model.layers * exchange.layer_s(count) + exchange.embedding_s(count))
            for count in range(tokens)
        ]
        sampled = _sum(files.per_sequence, tokens, 1)
        sampled += [1e6 * exchange.logits_s(count) for count in range(tokens)]
        self._layers = model.layers
        self._tokens, self._sampled = per_token.tolist(), sampled.tolist()
        self._attention = PrefillKeyTable(files.attention, files.folder / "attention.csv")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        tp: int = 1,
        *,
        model: ModelSpec | None = None,
        device: DeviceSpec | None = None,
        link: Link | None = None,
    ) -> "ProfileTimes":
        """Read the tables for ``tp`` devices from ``folder``.

        model: says how many layers there are; by default the one that ``meta.yaml`` names. link: how fast
        ``tp`` devices sum their results; by default as rows ``all_reduce`` of ``dense.csv`` say, and without
        such rows as the data sheet of ``device`` does, or of the hardware that ``meta.yaml`` names. Raises a
        ConfigError that names file and line, the degrees that there are, or what is missing.
        """
        files = read_profile(Path(folder), tp)
        shape = model or require_named(measured_model(files.meta), "model", files, folder)
        if tp > 1 and link is None and REDUCTION not in files.dense:
            link = (device or require_named(measured_device(files.meta), "device", files, folder)).link
        return cls(files, shape, link)

    def step_time(self, rows: StepRows) -> float:
        """Seconds of one step."""
        fixed = _at(self._tokens, rows.new_tokens) + _at(self._sampled, rows.sampled)
        decodes = rows.decodes
        context = rows.decode_context / decodes if decodes else 0.0
        if rows.chunks:
            attention = self._attention.chunks(rows.chunks, decodes, context)
        else:
            attention = self._attention.decode_line(decodes).at(context)
        return (fixed + self._layers * attention) / 1e6

    def widening(self, tokens: int, padded: int) -> float:
        """Seconds that a step of ``tokens`` takes longer, attention apart, where it computes ``padded``."""
        return (_at(self._tokens, padded) - _at(self._tokens, tokens)) / 1e6

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        """Seconds of each of a run of decode steps."""
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        fixed = _at(self._tokens, sequences) + _at(self._sampled, sequences)
        attention = self._attention.decode_line(sequences).many(contexts / sequences)
        result: FloatArray = (fixed + self._layers * attention) / 1e6
        return result


def token_range(files: ProfileFiles) -> int:
    """How many entries the tables by tokens have, from 0 tokens on."""
    curves = (*files.dense.values(), *files.experts.values())
    return 1 + max(LEAST_TOKENS, *(int(curve.counts[-1]) for curve in curves))


def _sum(curves: Mapping[str, Curve], count: int, layers: int) -> FloatArray:
    """Microseconds of all parts together at 0 .. count - 1 tokens or rows."""
    total = np.zeros(count)
    for name, curve in curves.items():
        if name == REDUCTION:
            continue
        times = 1 if name in PER_STEP else layers * TIMES_PER_LAYER.get(name, 1)
        total += times * curve.at_integers(count - 1)
    return total


def _exchange(files: ProfileFiles, model: ModelSpec, link: Link | None) -> RequestContext:
    """What the devices exchange: over the link, or as it was measured."""
    if files.tp == 1:
        return RequestContext(model, lambda _: 0.0)
    if link is not None:
        return RequestContext(model, partial(link.all_reduce, devices=files.tp))
    micros = files.dense[REDUCTION].at_integers(token_range(files)).tolist()
    return RequestContext(model, lambda message: _at(micros, round(message / (2 * model.hidden))) / 1e6)


def _at(values: list[float], count: int) -> float:
    """The value at ``count``; beyond the end extrapolated from the last two."""
    last = len(values) - 1
    if count <= last:
        return values[count]
    return values[last] + (count - last) * (values[last] - values[last - 1])


def require_named(found: _T | None, what: str, files: ProfileFiles, folder: str | Path) -> _T:
    """``found``, or a ConfigError that quotes what ``meta.yaml`` says."""
    if found is None:
        key = {"model": "model", "device": "hardware"}[what]
        raise ConfigError(
            f"{Path(folder) / 'meta.yaml'}: {key} {files.meta.get(key)!r} is not a {what} on record; say "
            f"which {what} it is"
        )
    return found
