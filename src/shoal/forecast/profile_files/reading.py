"""Reads a folder of measured layer times (CSV and meta.yaml), in the format of LLMServingSim's profiler."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from shoal.core import ConfigError
from shoal.forecast.device_specs import DEVICE_SPECS, DeviceSpec, find_device_spec
from shoal.forecast.latency import FloatArray
from shoal.forecast.model_spec import ModelSpec, find_model_spec
from shoal.forecast.profile_files.attention import PrefillPoint, by_prefill_key


def read_meta(folder: Path) -> Mapping[str, Any]:
    """Contents of ``meta.yaml``, {} without the file; raises ConfigError unless it is a mapping."""
    path = folder / "meta.yaml"
    if not path.is_file():
        return {}
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{path}: expected a mapping, got {type(meta).__name__}")
    return meta


def measured_model(meta: Mapping[str, Any]) -> ModelSpec | None:
    """The measured model; None if not named or unknown."""
    return find_model_spec(str(meta.get("model", "")))


def measured_device(meta: Mapping[str, Any]) -> DeviceSpec | None:
    """The measured device, by its name or the driver's name for it; None if not named or unknown."""
    found = find_device_spec(str(meta.get("hardware", "")))
    if found is not None:
        return found
    driver_name = "".join(letter for letter in str(meta.get("gpu", "")).lower() if letter.isalnum())
    named = [name for name in DEVICE_SPECS if name.replace("-", "") in driver_name]
    return DEVICE_SPECS[max(named, key=len)] if named else None


_BY_CONTEXT = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
_BY_KEY = ("prefill_chunk", "prefill_key", "n_decode", "kv_decode")
_DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "attention.csv": {"layer": "attention", "decode_q_len": "1"},
    "moe.csv": {"ep": "1"},
}
"""Defaults of key columns that are missing in older files."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Microseconds measured at some counts."""

    counts: FloatArray
    """Sorted and distinct."""
    micros: FloatArray
    """The time at each count."""

    def at_integers(self, most: int) -> FloatArray:
        """Microseconds at 0, 1, ... ``most``: interpolated linearly between the measured counts.

        Above the last count they are extrapolated from the last two; below the first they are constant, and 0
        at 0.
        """
        counts = np.arange(most + 1, dtype=np.float64)
        values = np.interp(counts, self.counts, self.micros)
        beyond = counts > self.counts[-1]
        if beyond.any() and len(self.counts) > 1:
            slope = (self.micros[-1] - self.micros[-2]) / (self.counts[-1] - self.counts[-2])
            values[beyond] = self.micros[-1] + max(float(slope), 0.0) * (counts[beyond] - self.counts[-1])
        values[0] = 0.0
        return values


@dataclass(frozen=True, slots=True)
class ProfileFiles:
    """The contents of a profile's files, for one degree of tensor parallelism. Times are microseconds."""

    folder: Path
    tp: int
    dense: Mapping[str, Curve]
    """Times of parts of a layer, and of parts that run once per step (``PER_STEP``), by tokens."""
    per_sequence: Mapping[str, Curve]
    """Times of parts that run once per step, by sampled rows."""
    attention: Mapping[PrefillPoint, float]
    experts: Mapping[int, Curve]
    """Times of one device's experts by tokens, for each measured number of active experts; empty in dense
    models."""
    experts_file: Path
    """Source of ``experts``."""
    meta: Mapping[str, Any]
    """Contents of ``meta.yaml``."""


def read_profile(folder: Path, tp: int) -> ProfileFiles:
    """Read the tables of degree ``tp`` from ``folder/tp<N>``, or from ``folder`` itself if they are there.

    Raises a ConfigError that names the file and line, or the available degrees.
    """
    meta = read_meta(folder)
    tables = _tables_of(folder, tp, meta)
    experts = folder / "tp1" / "moe.csv"
    if not experts.is_file():
        experts = tables / "moe.csv"
    attention = tables / "attention.csv"
    by_key = "prefill_key" in _header(attention)
    return ProfileFiles(
        folder=tables,
        tp=tp,
        dense=_read_curves(tables / "dense.csv", "tokens"),
        per_sequence=_read_curves(tables / "per_sequence.csv", "sequences"),
        attention=_read_attention_by_key(attention) if by_key else _read_attention(attention),
        experts=_read_experts(experts, tp) if experts.is_file() else {},
        experts_file=experts,
        meta=meta,
    )


def _tables_of(folder: Path, tp: int, meta: Mapping[str, Any]) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"profile folder {folder} does not exist")
    if (folder / "dense.csv").is_file():
        degrees = [int(degree) for degree in meta.get("tp_degrees") or [1]]
        found = folder
    else:
        found = folder / f"tp{tp}"
        names = (path.name[2:] for path in folder.glob("tp*") if (path / "dense.csv").is_file())
        degrees = sorted(int(name) for name in names if name.isdigit())
    if not degrees:
        raise ConfigError(
            f"{folder} holds no profile: expected dense.csv, per_sequence.csv and attention.csv in it or "
            f"in tp<N> below it"
        )
    if tp not in degrees or (found == folder and len(degrees) > 1):
        raise ConfigError(
            f"profile {folder} has no tables for tp={tp}; it has tp={', '.join(map(str, degrees))}"
        )
    if (found / "linear_attention.csv").is_file():
        raise ConfigError(f"{found / 'linear_attention.csv'}: layers of linear attention are not supported")
    return found


def _read_attention(path: Path) -> dict[PrefillPoint, float]:
    return by_prefill_key(
        {
            (int(chunk), int(before), int(decodes), int(context)): micros
            for (chunk, before, decodes, context), micros in _attention_rows(path, _BY_CONTEXT)
        }
    )


def _read_attention_by_key(path: Path) -> dict[PrefillPoint, float]:
    return {
        (int(tokens), float(key), int(decodes), int(context)): micros
        for (tokens, key, decodes, context), micros in _attention_rows(path, _BY_KEY)
    }


def _attention_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[Sequence[str | float], float]]:
    """Rows of the attention kernel in which a decoding row computes one token."""
    for (layer, queries, *key), micros in _rows(path, ("layer", "decode_q_len", *columns)):
        if layer != "attention":
            raise ConfigError(
                f"{path} has rows of {layer}; only layers with one attention kernel can be timed"
            )
        if queries == 1:
            yield key, micros


def _read_experts(path: Path, devices: int) -> dict[int, Curve]:
    """Curves over tokens, by active experts, of one of ``devices`` devices that share the experts."""
    degrees: set[int] = set()
    points: dict[int, dict[float, float]] = {}
    for key, micros in _rows(path, ("ep", "tokens", "activated_experts")):
        degree, tokens, experts = map(int, key)
        degrees.add(degree)
        if degree == devices:
            points.setdefault(experts, {})[float(tokens)] = micros
    if not points:
        raise ConfigError(
            f"{path} has no rows for experts shared by {devices} devices; it has ep="
            f"{', '.join(map(str, sorted(degrees)))}"
        )
    return {experts: _curve(values) for experts, values in points.items()}


def _read_curves(path: Path, count: str) -> dict[str, Curve]:
    points: dict[str, dict[float, float]] = {}
    for (layer, number), micros in _rows(path, ("layer", count)):
        points.setdefault(str(layer), {})[float(number)] = micros
    return {layer: _curve(values) for layer, values in points.items()}


def _curve(values: Mapping[float, float]) -> Curve:
    counts = np.array(sorted(values))
    return Curve(counts, np.array([values[count] for count in counts]))


def _header(path: Path) -> Sequence[str]:
    """Column names; empty if the file is missing or empty."""
    if not path.is_file():
        return ()
    with path.open(newline="", encoding="utf-8") as lines:
        return csv.DictReader(lines).fieldnames or ()


def _rows(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str | float, ...], float]]:
    """(key columns, microseconds) of each line: layers as text, prefill keys as floats, others as int."""
    defaults = _DEFAULTS.get(path.name, {})
    needed = [name for name in (*keys, "time_us") if name not in defaults]
    if not path.is_file():
        raise ConfigError(f"{path} is missing; it must have the columns {', '.join(needed)}")
    seen = False
    with path.open(newline="", encoding="utf-8") as lines:
        reader = csv.DictReader(lines)
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path}:1: column {', '.join(missing)} is missing")
        for row in reader:
            where = f"{path}:{reader.line_num}"
            filled = {**defaults, **row}
            yield (
                tuple(_key(filled[name], name, where) for name in keys),
                _number(row["time_us"], "time_us", where),
            )
            seen = True
    if not seen:
        raise ConfigError(f"{path}:2: no rows")


def _key(text: str | None, name: str, where: str) -> str | float:
    if name == "layer":
        if not text:
            raise ConfigError(f"{where}: layer is empty")
        return text
    if name == "prefill_key":
        return _number(text, name, where)
    try:
        number = int(text or "")
    except ValueError:
        raise ConfigError(f"{where}: {name} must be a whole number, got {text!r}") from None
    if number < 0:
        raise ConfigError(f"{where}: {name} must not be negative, got {number}")
    return number


def _number(text: str | None, name: str, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ConfigError(f"{where}: {name} must be a number of at least 0, got {text!r}")
    return number
