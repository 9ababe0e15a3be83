"""HTTP helpers of the CLI's clients: base URL, Authorization header, error messages of a response."""

import httpx

from shoal.config.api_keys import secret_problem
from shoal.core import ConfigError


def base_url(url: str) -> str:
    """The base URL of a server; users write it with or without ``http://`` and ``/v1``."""
    base = url.rstrip("/").removesuffix("/v1")
    return base if "://" in base else f"http://{base}"


def first_key(keys: str | None) -> str | None:
    """The first key: `shoal serve` takes several from the same environment variable."""
    return next(iter((keys or "").split()), None)


def auth_headers(key: str | None, source: str) -> dict[str, str]:
    """The Authorization header of a key, if there is one.

    source: where the key was given, for the ConfigError about a key that no header can hold.
    """
    if key is None:
        return {}
    if wrong := secret_problem(key):
        raise ConfigError(f"{wrong} (here {source})")
    return {"Authorization": f"Bearer {key}"}


def connection_problem(error: Exception) -> str:
    """The message of a connection error; for a group of errors, of the first."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def error_message(response: httpx.Response) -> str:
    """The message of an OpenAI error body; any other body as text."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def error_code(response: httpx.Response) -> str | None:
    """The code of an OpenAI error body; None for any other body."""
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
