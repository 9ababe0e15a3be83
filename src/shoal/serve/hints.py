"""What a client may have meant that asked for a route that does not exist."""

from collections.abc import Collection
from difflib import get_close_matches

_PREFIX = "/v1"
_MAX_PATH_CHARACTERS = 100


def route_hint(path: str, routes: Collection[str]) -> str:
    """A sentence about the nearest of ``routes``; without one, where they are listed."""
    path = path[:_MAX_PATH_CHARACTERS]
    trimmed = path.rstrip("/")
    if trimmed in routes:
        return f"did you mean {trimmed}, without the slash at its end?"
    repeated = trimmed.startswith(f"{_PREFIX}{_PREFIX}/")
    if repeated and trimmed.removeprefix(_PREFIX) in routes:
        return (
            f"did you mean {trimmed.removeprefix(_PREFIX)}? The path has {_PREFIX} twice: this client "
            f"adds it itself, so its base URL must not end with {_PREFIX}"
        )
    if f"{_PREFIX}{trimmed}" in routes:
        return f"did you mean {_PREFIX}{trimmed}? The client's base URL (base_url) must end with {_PREFIX}"
    near = get_close_matches(trimmed, routes, n=1, cutoff=0.8)
    return f"did you mean {near[0]}?" if near else "GET / lists them"
