"""Step times from tables of measured layer times: a layer's parts by tokens, attention by its shape.

A step takes as long as its kernels, one after the other: the parts of a layer, its attention and its experts
if it has any, once for each layer; embedding, final norm, logits and sampling once. Between measured points
times are linear.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from shoal.core import ConfigError
from shoal.forecast.device_specs import DeviceSpec, find_device_spec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec, find_model_spec
from shoal.forecast.profile_experts import expert_block
from shoal.forecast.profile_files import Curve, ProfileFiles, read_profile
from shoal.forecast.profile_prefill_keys import PrefillKeyTable
from shoal.forecast.step_times import StepRows

_T = TypeVar("_T")

PER_STEP = frozenset({"embedding", "final_layernorm"})
"""Parts in ``dense.csv`` that run once in a step; all others run in each layer."""
TIMES_PER_LAYER = {"layernorm": 2}
"""Parts that run several times in a layer, such as before attention and before the MLP."""
LEAST_TOKENS = 8192
"""Times are computed beforehand for steps of at least so many tokens, however few were measured."""


class ProfileTimes:
    """Step times from tables of one model on one device."""

    def __init__(self, files: ProfileFiles, model: ModelSpec, overhead: FloatArray | None = None) -> None:
        """model: says how many layers there are; the tables have the times of one. overhead: seconds that a
        step of 0, 1, 2, ... tokens takes beyond the tables; at least ``token_range(files)`` entries.

        Raises ConfigError if only one of model and tables has experts.
        """
        tokens = token_range(files)
        per_token = _sum(files.dense, tokens, model.layers)
        per_token += model.layers * expert_block(files, model, tokens)
        if overhead is not None:
            per_token += overhead[:tokens] * 1e6
        self._layers = model.layers
        self._tokens = per_token.tolist()
        self._sampled = _sum(files.per_sequence, tokens, 1).tolist()
        self._attention = PrefillKeyTable(files.attention, files.folder / "attention.csv")

    @classmethod
    def load(
        cls,
        folder: str | Path,
        tp: int = 1,
        *,
        model: ModelSpec | None = None,
        device: DeviceSpec | None = None,
        overhead_s: float = 0.0,
    ) -> "ProfileTimes":
        """Read the tables for ``tp`` devices from ``folder``.

        model: says how many layers there are; by default the one that ``meta.yaml`` names. device: says how
        long a reduction over ``tp`` devices takes if ``dense.csv`` has no rows ``all_reduce``; by default the
        hardware that ``meta.yaml`` names. overhead_s: time of every step beyond the tables, such as the
        host's work between two steps if nothing hides it. Raises a ConfigError that names file and line, the
        degrees that there are, or what is missing.
        """
        if overhead_s < 0:
            raise ConfigError(f"the overhead of a step must not be negative, got {overhead_s}")
        files = read_profile(Path(folder), tp)
        shape = model or _named(find_model_spec(str(files.meta.get("model", ""))), "model", files, folder)
        overhead = np.full(token_range(files), overhead_s)
        if tp > 1 and "all_reduce" not in files.dense:
            sheet = device or _named(
                find_device_spec(str(files.meta.get("hardware", ""))), "device", files, folder
            )
            for tokens in range(1, len(overhead)):
                reduction = sheet.link.all_reduce(2.0 * tokens * shape.hidden, tp)
                overhead[tokens] += 2 * shape.layers * reduction
        return cls(files, shape, overhead)

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
        times = 1 if name in PER_STEP else layers * TIMES_PER_LAYER.get(name, 1)
        total += times * curve.at_integers(count - 1)
    return total


def _at(values: list[float], count: int) -> float:
    """The value at ``count``; beyond the end extrapolated from the last two."""
    last = len(values) - 1
    if count <= last:
        return values[count]
    return values[last] + (count - last) * (values[last] - values[last - 1])


def _named(found: _T | None, what: str, files: ProfileFiles, folder: str | Path) -> _T:
    """``found``, or a ConfigError that quotes what ``meta.yaml`` says."""
    if found is None:
        key = {"model": "model", "device": "hardware"}[what]
        raise ConfigError(
            f"{Path(folder) / 'meta.yaml'}: {key} {files.meta.get(key)!r} is not a {what} on record; say "
            f"which {what} it is"
        )
    return found
