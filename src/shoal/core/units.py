"""Parsing and formatting of sizes (``2GiB``), byte rates, durations (``200ms``) and fractions (``5%``)."""

import math
import re

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_QUANTITY = re.compile(rf"^{_NUMBER}\s*([A-Za-z]*)$")
_PERCENT = re.compile(rf"^{_NUMBER}\s*%$")
LONGEST_S = 10 * 365 * 86_400.0
"""Limit on durations."""

_PREFIXES = {
    "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40
}  # fmt: skip
SIZE_UNITS = {"": 1, "b": 1, "byte": 1, "bytes": 1} | {
    prefix + ending: factor for prefix, factor in _PREFIXES.items() for ending in ("", "b")
}
"""Bytes of each unit, in lower case. ``2G`` is ``2GB`` and ``2Gi`` is ``2GiB``, as in Kubernetes."""
_TIME_WORDS = {
    "us microsecond microseconds": 1e-6,
    "ms msec msecs millisecond milliseconds": 1e-3,
    "s sec secs second seconds": 1.0,
    "m min mins minute minutes": 60.0,
    "h hr hrs hour hours": 3600.0,
    "d day days": 86_400.0,
}
TIME_UNITS = {word: factor for words, factor in _TIME_WORDS.items() for word in words.split()}
"""Seconds of each unit, in lower case."""
_TIME = re.compile(rf"(?:{_NUMBER}\s*[a-z]+\s*)+|{_NUMBER}")
_TIME_PART = re.compile(rf"{_NUMBER}\s*([a-z]*)")


def parse_size(text: str) -> int:
    """Bytes in ``2GiB``, ``2Gi``, ``512MB`` or ``4096``; raises ValueError with examples."""
    match = _QUANTITY.match(text.strip())
    factor = SIZE_UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"expected a size such as 512MB, 2GiB or a number of bytes, got {text!r}")
    if match[1].isdigit():
        return int(match[1]) * factor
    return round(float(match[1]) * factor)


def parse_byte_rate(text: str) -> float:
    """Bytes per second in ``25GB``, ``25GB/s`` or ``16e9``; raises ValueError with examples."""
    try:
        bytes_per_s = float(text)
    except ValueError:
        try:
            return float(parse_size(text.strip().removesuffix("/s")))
        except ValueError:
            bytes_per_s = math.nan
    if not math.isfinite(bytes_per_s):
        raise ValueError(f"expected bytes per second, such as 25GB or 16e9, got {text!r}")
    return bytes_per_s


def parse_duration(text: str) -> float:
    """Seconds in ``200ms``, ``1.5m``, ``5 minutes``, ``1h30m`` or ``2``; raises ValueError with examples."""
    written = text.strip().lower()
    parts = _TIME_PART.findall(written) if _TIME.fullmatch(written) else []
    factors = [TIME_UNITS.get(unit or "s", 0.0) for _, unit in parts]
    if not factors or not all(factors) or factors != sorted(set(factors), reverse=True):
        raise ValueError(
            f"expected a time such as 200ms, 2s, 1.5m, 5 minutes, 1h30m or a number of seconds, got {text!r}"
        )
    seconds = math.fsum(float(part[0]) * factor for part, factor in zip(parts, factors, strict=True))
    if seconds > LONGEST_S:
        raise ValueError(f"expected a time of at most ten years, got {text!r}")
    return seconds


def parse_number(text: str) -> float:
    """A finite number, or a percentage as a fraction (``5%`` is 0.05); raises ValueError with examples."""
    percent = _PERCENT.match(text.strip())
    if percent:
        return float(percent[1]) / 100
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(f"expected a number such as 0.05 or a percentage such as 5%, got {text!r}")
    return value


def format_size(size: int) -> str:
    """``size`` in the largest exact binary unit, else in bytes: ``2GiB``."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = SIZE_UNITS[unit.lower()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def format_byte_rate(bytes_per_s: float) -> str:
    """Bytes per second in the largest unit that is exact with three digits after the point: ``25GB``."""
    whole = round(bytes_per_s)
    for unit in ("TB", "GB", "MB", "kB"):
        factor = SIZE_UNITS[unit.lower()]
        if whole >= factor and whole * 1000 % factor == 0:
            return f"{whole / factor:.3f}".rstrip("0").rstrip(".") + unit
    return str(whole)


def format_duration(seconds: float) -> str:
    """Such as ``60us``, ``200ms``, ``2s``, ``1.5s``."""
    for unit, count in (("ms", seconds * 1e3), ("us", seconds * 1e6)):
        if 0 < seconds < 1 and math.isclose(count, round(count)):
            return f"{round(count)}{unit}"
    return f"{seconds:g}s"
