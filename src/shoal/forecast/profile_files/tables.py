"""Profile step-time model: sums of measured layer times, with experts, collectives and attention."""

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
from shoal.forecast.roofline import expected_active_experts
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows
from shoal.forecast.tensor_parallel import CollectiveTimes

_DENSE_MLP = ("gate_up_proj", "act_fn", "down_proj")


def expert_times(files: ProfileFiles, model: ModelSpec, tokens: int) -> FloatArray:
    """Microseconds of one layer's experts and router at 0 .. ``tokens`` - 1 tokens; 0 in dense models.

    Each device has an equal share of the experts and computes all tokens of the step. Tokens are assumed to
    choose experts independently and evenly, so every device reads equally many; a trained router is uneven
    and activates fewer. Raises ConfigError if tables and model do not match.
    """
    _check(files, model)
    if not files.experts:
        return np.zeros(tokens)
    active = _active_experts(model, tokens)
    return interpolate_experts(files.experts, active / files.tp)


def rank_expert_times(
    files: ProfileFiles, model: ModelSpec, ranks: int, imbalance: float, tokens: int
) -> FloatArray:
    """Microseconds of one layer's experts and router at 0 .. ``tokens`` - 1 tokens of all ``ranks``.

    The busiest rank computes ``imbalance`` times an even share of the tokens with its share of the active
    experts; the time was measured on one device with as many tokens and experts. Raises ConfigError as
    ``expert_times``.
    """
    _check(files, model)
    active = _active_experts(model, tokens)
    share = np.array([count * imbalance / ranks for count in range(tokens)])
    return interpolate_experts(files.experts, active / ranks, share)


def _active_experts(model: ModelSpec, tokens: int) -> FloatArray:
    """Expected number of active experts at 0 .. ``tokens`` - 1 tokens."""
    experts, per_token = model.experts, model.experts_per_token
    return np.array([expected_active_experts(experts, per_token, count) for count in range(tokens)])


def interpolate_experts(
    curves: Mapping[int, Curve], active: FloatArray, tokens: FloatArray | None = None
) -> FloatArray:
    """Microseconds at ``tokens`` with ``active`` experts, interpolated linearly.

    tokens: one for each of ``active``; None: 0, 1, ... curves: by active experts. Times are constant below
    the smallest measured number of experts, and extrapolated from the last two above the largest.
    """
    measured = np.array(sorted(curves), dtype=np.float64)
    indices = np.arange(len(active))
    times = np.array([curves[int(experts)].at_integers(len(active) - 1) for experts in measured])
    if tokens is not None:
        times = np.array([np.interp(tokens, indices, row) for row in times])
    if len(measured) == 1:
        only: FloatArray = times[0]
        return only
    i = np.clip(np.searchsorted(measured, active, side="right") - 1, 0, len(measured) - 2)
    share = np.maximum((active - measured[i]) / (measured[i + 1] - measured[i]), 0.0)
    low, high = times[i, indices], times[i + 1, indices]
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
"""Parts in ``dense.csv`` that run once per step; all others run in each layer."""
REDUCTION = "all_reduce"
"""The row in ``dense.csv`` for one all-reduce of a step's hidden states; see ``CollectiveTimes``."""
TIMES_PER_LAYER = {"layernorm": 2}
"""Parts that run several times per layer: before attention and before the MLP."""
MIN_TABLE_TOKENS = 8192
"""Times are precomputed for steps of at least up to this many tokens."""


class ProfileTimes:
    """Step times from tables of one model on one device."""

    def __init__(self, files: ProfileFiles, model: ModelSpec, link: Link | None = None) -> None:
        """model: for the number of layers; the tables have the times of one layer. link: between several
        devices; None: collectives as measured, in rows ``all_reduce`` of ``dense.csv``.

        Raises ConfigError if only one of model and tables has experts.
        """
        tokens = token_range(files)
        collectives = _collectives(files, model, link)
        per_token = _sum(files.dense, tokens, model.layers)
        per_token += model.layers * expert_times(files, model, tokens)
        per_token += [
            1e6 * (model.layers * collectives.layer_s(count) + collectives.embedding_s(count))
            for count in range(tokens)
        ]
        sampled = _sum(files.per_sequence, tokens, 1)
        sampled += [1e6 * collectives.logits_s(count) for count in range(tokens)]
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

        model: by default the model named in ``meta.yaml``. link: between the ``tp`` devices; by default, the
        rows ``all_reduce`` of ``dense.csv``, or without such rows the data sheet of ``device`` or of the
        hardware named in ``meta.yaml``. Raises a ConfigError that names file and line, the available degrees,
        or what is missing.
        """
        files = read_profile(Path(folder), tp)
        shape = model or require_named(measured_model(files.meta), "model", files, folder)
        if tp > 1 and link is None and REDUCTION not in files.dense:
            link = (device or require_named(measured_device(files.meta), "device", files, folder)).link
        return cls(files, shape, link)

    def step_time(self, rows: StepRows) -> float:
        fixed = _at(self._tokens, rows.new_tokens) + _at(self._sampled, rows.sampled)
        decodes = rows.decodes
        context = rows.decode_context / decodes if decodes else 0.0
        if rows.chunks:
            attention = self._attention.chunks(rows.chunks, decodes, context)
        else:
            attention = self._attention.decode_line(decodes).at(context)
        return (fixed + self._layers * attention) / 1e6

    def padding_time(self, tokens: int, padded: int) -> float:
        """Additional seconds, without attention, of a step of ``tokens`` that is padded to ``padded``."""
        return (_at(self._tokens, padded) - _at(self._tokens, tokens)) / 1e6

    def decode_times(self, sequences: int, context: int, steps: int) -> FloatArray:
        contexts = np.arange(context, context + sequences * steps, sequences, dtype=np.int64)
        fixed = _at(self._tokens, sequences) + _at(self._sampled, sequences)
        attention = self._attention.decode_line(sequences).many(contexts / sequences)
        result: FloatArray = (fixed + self._layers * attention) / 1e6
        return result


def token_range(files: ProfileFiles) -> int:
    """Number of entries of the tables by tokens, from 0 tokens on."""
    curves = (*files.dense.values(), *files.experts.values())
    return 1 + max(MIN_TABLE_TOKENS, *(int(curve.counts[-1]) for curve in curves))


def _sum(curves: Mapping[str, Curve], count: int, layers: int) -> FloatArray:
    """Microseconds of all parts at 0 .. count - 1 tokens or rows."""
    total = np.zeros(count)
    for name, curve in curves.items():
        if name == REDUCTION:
            continue
        times = 1 if name in PER_STEP else layers * TIMES_PER_LAYER.get(name, 1)
        total += times * curve.at_integers(count - 1)
    return total


def _collectives(files: ProfileFiles, model: ModelSpec, link: Link | None) -> CollectiveTimes:
    """Times of collectives: by the link, or as measured."""
    if files.tp == 1:
        return CollectiveTimes(model, lambda _: 0.0)
    if link is not None:
        return CollectiveTimes(model, partial(link.all_reduce, devices=files.tp))
    micros = files.dense[REDUCTION].at_integers(token_range(files)).tolist()
    return CollectiveTimes(model, lambda message: _at(micros, round(message / (2 * model.hidden))) / 1e6)


def _at(values: list[float], count: int) -> float:
    """The value at ``count``; beyond the end, extrapolated from the last two."""
    last = len(values) - 1
    if count <= last:
        return values[count]
    return values[last] + (count - last) * (values[last] - values[last - 1])


def require_named(found: _T | None, what: str, files: ProfileFiles, folder: str | Path) -> _T:
    """``found``; raises a ConfigError that quotes ``meta.yaml`` if it is None."""
    if found is None:
        key = {"model": "model", "device": "hardware"}[what]
        raise ConfigError(
            f"{Path(folder) / 'meta.yaml'}: {key} {files.meta.get(key)!r} is not a {what} on record; say "
            f"which {what} it is"
        )
    return found
