"""HTTP client of a running server's admin API (``/admin/...``)."""

import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import httpx

from shoal.cli.http_client import auth_headers, base_url, connection_problem, error_message
from shoal.core import ConfigError, EngineDied, ShoalError
from shoal.models.progress import Progress

_TIMEOUT_S = 10.0
_POLL_S = 0.2
_MISUSE = (httpx.codes.BAD_REQUEST, httpx.codes.NOT_FOUND)
_KEY_SOURCE = "--admin-key or SHOAL_ADMIN_KEY gives it"
_ACCESS_DENIED = (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)


class AdminClient:
    """The admin API of the server at ``url``; key: its admin key, if any.

    All methods raise ConfigError if the server denies access or rejects the request, EngineDied if there is
    no server.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url
        self._base = base_url(url)
        self._headers = auth_headers(key, _KEY_SOURCE)

    def get(self, path: str) -> dict[str, Any]:
        """The response of ``GET /admin/PATH``."""
        return self._request("GET", path)

    def list(self, path: str) -> dict[str, Any]:
        """The response of ``GET /admin/PATH``, whose ``data`` is a list."""
        response_body = self._request("GET", path)
        if not isinstance(response_body.get("data"), list):
            raise self._unexpected_response(httpx.codes.OK)
        return response_body

    def start(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request to ``/admin/PATH``; returns the operation that it starts."""
        return self._request(method, path, body)

    def wait(self, operation: Mapping[str, Any], progress: Progress) -> None:
        """Poll an operation until it has ended; raises ShoalError with its error if it failed."""
        while operation["state"] == "running":
            if operation["progress"]:
                progress(operation["progress"], operation["done"], operation["total"])
            time.sleep(_POLL_S)
            operation = self._request("GET", f"operations/{operation['id']}")
        if operation["state"] != "done":
            raise ShoalError(str(operation["error"]))

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        url = f"{self._base}/admin/{path}"
        try:
            response = httpx.request(method, url, json=body, headers=self._headers, timeout=_TIMEOUT_S)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol, UnicodeError) as error:
            raise ConfigError(f"--url {self._url}: {error}") from None
        except (httpx.HTTPError, OverflowError) as error:
            raise EngineDied(
                f"no server at {self._url} ({connection_problem(error)}); "
                "start one with `shoal serve smollm2`"
            ) from error
        if response.status_code in _ACCESS_DENIED:
            raise ConfigError(f"{self._url}: {error_message(response)} (here {_KEY_SOURCE})")
        return self._read(response)

    def _read(self, response: httpx.Response) -> dict[str, Any]:
        try:
            response_body = dict(response.json())
        except (ValueError, TypeError):
            raise self._unexpected_response(response.status_code) from None
        if response.is_success:
            return response_body
        if not isinstance(response_body.get("error"), dict):
            raise self._unexpected_response(response.status_code)
        message = error_message(response)
        raise ConfigError(message) if response.status_code in _MISUSE else ShoalError(message)

    def _unexpected_response(self, status: int) -> EngineDied:
        return EngineDied(f"{self._url} answered with status {status}: is it a Shoal server?")


def quote_name(name: str) -> str:
    """Quote a name for a URL path; slashes stay. Raises ConfigError for a name that is not UTF-8 text."""
    try:
        return quote(name)
    except UnicodeEncodeError as error:
        raise ConfigError(f"the name {name!r} is not UTF-8 text") from error
