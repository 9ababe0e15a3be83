"""Asks the operators' routes of a running server, and starts operations there."""

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from shoal.cli.answers import bearer, error_message, server_base, why
from shoal.core import ConfigError, EngineDied, ShoalError
from shoal.models.progress import Progress

_TIMEOUT_S = 10.0
_POLL_S = 0.2
_MISUSE = (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND)
_KEY_SOURCE = "--admin-key or SHOAL_ADMIN_KEY gives it"
_NOT_LET = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class AdminClient:
    """The operators' routes of the server at ``url``; key: its admin key, if any.

    All methods raise ConfigError if the server does not let us or says that we ask for something wrong,
    EngineDied if there is no server.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._base = server_base(url)
        self._headers = bearer(key, _KEY_SOURCE)

    def list(self, what: str) -> dict[str, Any]:
        """What ``GET /admin/WHAT`` answers, which is a list as ``data``."""
        answer = self._ask("GET", what)
        if not isinstance(answer.get("data"), list):
            raise self._not_ours(httpx.codes.OK)
        return answer

    def start(self, method: str, what: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Start an operation with a request to ``/admin/WHAT``."""
        return self._ask(method, what, body)

    def wait(self, operation: Mapping[str, Any], progress: Progress) -> None:
        """Wait until an operation has ended; raises ShoalError with its error if it failed."""
        while operation["state"] == "running":
            if operation["progress"]:
                progress(operation["progress"], operation["done"], operation["total"])
            time.sleep(_POLL_S)
            operation = self._ask("GET", f"operations/{operation['id']}")
        if operation["state"] != "done":
            raise ShoalError(str(operation["error"]))

    def _ask(self, method: str, what: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._base}/admin/{what}"
        try:
            response = httpx.request(method, url, json=body, headers=self._headers, timeout=_TIMEOUT_S)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise ConfigError(f"--url {self._url}: {error}") from None
        except (httpx.HTTPError, OverflowError) as error:
            raise EngineDied(
                f"no server at {self._url} ({why(error)}); start one with `shoal serve smollm2`"
            ) from error
        if response.status_code in _NOT_LET:
            raise ConfigError(f"{self._url}: {error_message(response)} (here {_KEY_SOURCE})")
        return self._read(response)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        try:
            answer = dict(response.json())
        except (ValueError, TypeError):
            raise self._not_ours(response.status_code) from None
        if response.is_success:
            return answer
        if not isinstance(answer.get("error"), dict):
            raise self._not_ours(response.status_code)
        message = error_message(response)
        raise ConfigError(message) if response.status_code in _MISUSE else ShoalError(message)

    def _not_ours(self, status: int) -> EngineDied:
        return EngineDied(f"{self._url} answered with status {status}: is it a Shoal server?")


def in_path(name: str) -> str:
    """A name as a part of a path; slashes stay. Raises ConfigError for a name that is not UTF-8 text."""
    try:
        return quote(name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name {name!r} is not UTF-8 text") from error
