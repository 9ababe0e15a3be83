"""Where a server is asked, and what it says where it refuses a request."""

import httpx

from shoal.config.api_keys import secret_problem
from shoal.core import ConfigError


def server_base(url: str) -> str:
    """The address of a server as users write it: with or without ``http://`` and ``/v1``."""
    base = url.rstrip("/").removesuffix("/v1")
    return base if "://" in base else f"http://{base}"


def bearer(key: str | None, source: str) -> dict[str, str]:
    """The header that names a key, if there is one.

    source: where users write the key, for the ConfigError that is raised for one that no header can hold.
    """
    if key is None:
        return {}
    if wrong := secret_problem(key):
        raise ConfigError(f"{wrong} (here {source})")
    return {"Authorization": f"Bearer {key}"}


def why(error: Exception) -> str:
    """What went wrong with a connection; of a group of errors the first tells."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def error_message(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, or the body as it is."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def error_code(response: httpx.Response) -> str | None:
    """The code of an error in OpenAI's shape."""
    try:
        return str(response.json()["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return None
