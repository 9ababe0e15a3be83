"""Exposure of a server: who can use models and operators' routes, and warnings at the start."""

import logging

from shoal.serve.http.allowed_hosts import ANY, is_loopback
from shoal.serve.options import ServerOptions

_log = logging.getLogger(__name__)
_KEY = "server.api_keys, --api-key-file or SHOAL_API_KEY"
_ADMIN_KEY = "server.admin_key, --admin-key-file or SHOAL_ADMIN_KEY"


def exposure(options: ServerOptions, address: str) -> dict[str, str]:
    """Who can use models, operators' routes and open routes of a server that listens on ``address``."""
    local = is_loopback(address)
    anybody = "this machine, and whom a proxy on it lets through" if local else "everybody who reaches it"
    keys = len(options.named_api_keys())
    models = f"holders of an API key ({keys})" if keys else f"{anybody}, without a key"
    if options.admin_secret is not None:
        operators = "the holder of the admin key"
    elif keys:
        operators = f"nobody, as there are API keys and no admin key ({_ADMIN_KEY})"
    else:
        operators = (
            "programs on this machine, and a proxy on it that does not show (set an admin key behind one)"
        )
    return {"models": models, "/admin": operators, "/health, /metrics, /docs": anybody}


def log_warnings(options: ServerOptions, address: str) -> None:
    """Log the ``warnings``."""
    for warning in warnings(options, address):
        _log.warning(warning)


def warnings(options: ServerOptions, address: str) -> list[str]:
    """Options that let more people use the models than the server's owner may expect."""
    if options.named_api_keys():
        return []
    found = []
    if not is_loopback(address):
        found.append(
            f"server.host {options.host} without API keys: everybody who reaches it may use all models; set "
            f"{_KEY}, or listen on 127.0.0.1"
        )
    elif ANY in (options.allowed_hosts or ()):
        found.append(
            f"server.allowed_hosts {ANY} without API keys: web pages may use all models from a browser on "
            f"this machine, under a name of their own (DNS rebinding); set {_KEY}, or list names"
        )
    if ANY in options.cors_origins:
        found.append(
            f"server.cors_origins {ANY} without API keys: every web page may use all models from a browser "
            f"that reaches the server; set {_KEY}, or list origins"
        )
    return found
