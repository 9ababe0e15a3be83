"""Step times from tables of measured layer times: a layer's parts by tokens, attention by its shape.

A step takes as long as its kernels, one after the other: the parts of a layer, its attention and its experts
if it has any, once for each layer; embedding, final norm, logits and sampling once. Between measured points
times are linear.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec
from shoal.forecast.profile_experts import expert_block
from shoal.forecast.profile_files import Curve, ProfileFiles, read_profile
from shoal.forecast.profile_meta import measured_device, measured_model
from shoal.forecast.profile_prefill_keys import PrefillKeyTable
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows
from shoal.forecast.tensor_parallel import Exchange

_T = TypeVar("_T")

PER_STEP = frozenset({"embedding", "final_layernorm"})
"""Parts in ``dense.csv`` that run once in a step; all others run in each layer."""
REDUCTION = "all_reduce"
"""The row in ``dense.csv`` for one sum of a step's hidden states over all devices; see ``Exchange``."""
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


def _exchange(files: ProfileFiles, model: ModelSpec, link: Link | None) -> Exchange:
    """What the devices exchange: over the link, or as it was measured."""
    if files.tp == 1:
        return Exchange(model, lambda _: 0.0)
    if link is not None:
        return Exchange(model, partial(link.all_reduce, devices=files.tp))
    micros = files.dense[REDUCTION].at_integers(token_range(files)).tolist()
    return Exchange(model, lambda message: _at(micros, round(message / (2 * model.hidden))) / 1e6)


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
