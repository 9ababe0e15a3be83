"""Hints in 404 errors: the nearest route, or a wrong base URL."""

from collections.abc import Collection
from difflib import get_close_matches

_PREFIX = "/v1"
_MAX_PATH_CHARACTERS = 100
# Routes of Ollama's API that do not exist here, with alternatives.
_ADD_SERVICE = "POST /admin/services (`shoal services add`) serves a model of this machine"
_MISSING = {
    "/api/create": f"models are not made here; {_ADD_SERVICE}, with its template and sampling defaults",
    "/api/copy": f"models are not copied; {_ADD_SERVICE} under another name",
    "/api/blobs/": f"files are not uploaded; {_ADD_SERVICE}",
    "/api/push": "models are not published from here",
}


def route_hint(path: str, routes: Collection[str]) -> str:
    """A sentence about the nearest of ``routes``, or else about where they are listed."""
    path = path[:_MAX_PATH_CHARACTERS]
    trimmed = path.rstrip("/")
    for missing, alternative in _MISSING.items():
        if trimmed == missing or (missing.endswith("/") and path.startswith(missing)):
            return alternative
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
