"""Lookup of a policy by name, with a hint for misspelled names."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

from shoal.core.errors import ConfigError

Policy = TypeVar("Policy")


def lookup(axis: str, registry: Mapping[str, Policy], name: str) -> Policy:
    """The entry of ``registry`` called ``name``; raises ConfigError with the nearest name and all names.

    axis: the kind of policy, for the error message.
    """
    if name in registry:
        return registry[name]
    near = get_close_matches(name, registry, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{axis} {name!r} is not known; {hint}possible are {', '.join(sorted(registry))}")
