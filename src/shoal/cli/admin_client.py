"""Asks the operators' routes of a running server."""

from typing import Any

import httpx

from shoal.cli.answers import error_message
from shoal.core import ConfigError, EngineDied

_TIMEOUT_S = 10.0


def ask_admin(url: str, key: str | None, what: str) -> dict[str, Any]:
    """The list that ``GET /admin/WHAT`` of the server at ``url`` has as ``data``; key: its admin key, if any.

    Raises ConfigError if the server does not let us, EngineDied if there is no server.
    """
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        response = httpx.get(f"{base}/admin/{what}", headers=headers, timeout=_TIMEOUT_S)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
        raise ConfigError(f"--url {url}: {error}") from None
    except (httpx.HTTPError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise EngineDied(f"no server at {url} ({reason}); start one with `shoal serve smollm2`") from error
    if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise ConfigError(f"{url}: {error_message(response)} (here --admin-key or SHOAL_ADMIN_KEY gives it)")
    try:
        answer = response.json()
        if response.status_code == httpx.codes.OK and isinstance(answer["data"], list):
            return dict(answer)
    except (ValueError, KeyError, TypeError):
        pass
    raise EngineDied(f"{url} answered with status {response.status_code}: is it a Shoal server?")
