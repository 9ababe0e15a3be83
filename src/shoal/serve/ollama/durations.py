"""Durations of Ollama's keep_alive, such as "10m" or -1, in seconds."""

import math
import re
from typing import Annotated

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

FOREVER_S = (2**63 - 1) / 1e9
"""Ollama's longest duration, 292 years, for a model that stays loaded."""
_MAX_CHARACTERS = 64
_UNITS_S = {"h": 3600, "m": 60, "s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_NUMBER = r"(\d+\.?\d*|\.\d+)"
_PART = _NUMBER + "(ns|us|ms|h|m|s)"


def _seconds(value: str | float) -> float:
    """A duration in seconds, from a number of seconds or Go's syntax; infinite if negative."""
    if isinstance(value, str):
        sign, amount = ("-", value[1:]) if value.startswith("-") else ("", value.removeprefix("+"))
        amount = amount.replace("\N{MICRO SIGN}", "u").replace("\N{GREEK SMALL LETTER MU}", "u")
        if re.fullmatch(_NUMBER, amount):
            value = float(sign + amount)
        elif re.fullmatch(f"({_PART})+", amount):
            parts = re.findall(_PART, amount)
            value = float(f"{sign}1") * sum(float(number) * _UNITS_S[unit] for number, unit in parts)
        else:
            raise PydanticCustomError(
                "duration", 'Must be a number of seconds or a duration such as "10m", "1h30m" or "-1m"'
            )
    return math.inf if value < 0 or value >= FOREVER_S else float(value)


KeepAliveSeconds = Annotated[
    Annotated[str, Field(max_length=_MAX_CHARACTERS)] | int | float, AfterValidator(_seconds)
]
"""A client's duration, as seconds; infinite: forever."""
