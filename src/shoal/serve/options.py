"""Options of the HTTP server: address, limits, time-outs, API keys, allowed hosts, logging."""

import re
from dataclasses import dataclass, field
from typing import Literal

from shoal.config.api_keys import ApiKey, named_keys, secret_problem
from shoal.core import ConfigError

LogFormat = Literal["text", "json"]
LogLevel = Literal["info", "warning", "error"]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """0: any free port."""
    drain_s: float = 30.0
    """How long running requests may continue after the first SIGTERM or SIGINT."""
    max_body_bytes: int | None = None
    """Largest request body; a larger one gets a 413. None: 64 bytes for each token of the longest context,
    and at least 1 MiB."""
    log_level: LogLevel = "info"
    """Least severity that is logged; the access log has its own switch."""
    access_log: bool = False
    """Print a line for each request."""
    access_log_format: LogFormat = "text"
    vllm_metrics: bool = False
    """Also show metrics under vLLM's names."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names that the Host header may have, with any port; "*" allows all. None: on a loopback address its own
    names, else all."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that clients must send; without keys here and in api_key_file, clients need none."""
    api_key_file: tuple[ApiKey, ...] | None = None
    """More keys, from a file."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of the operators' routes. Without it here and in admin_key_file, these routes answer only requests
    from this machine, and none if there are API keys."""
    admin_key_file: str | None = field(default=None, repr=False)
    """The same, from a file."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What happens to unknown fields of requests that do not look like a misspelled known field."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts browsers let read responses; "*": all."""
    max_connections: int | None = None
    """Most open connections; further ones get a 503. None: as many as the process may open files, and at most
    4096."""
    read_timeout_s: float = 20.0
    """How long the headers of a request, and then its body, may take to arrive. Every KiB of the body extends
    the deadline by a second, but never beyond this time from now."""
    write_timeout_s: float = 30.0
    """How long written data may stay unread by the client. Every KiB that it reads extends the deadline by a
    second, but never beyond this time from now."""
    # Longer than clients keep idle connections, so that the clients close them first.
    keep_alive_s: float = 75.0
    """How long an idle connection stays open after a response."""

    def __post_init__(self) -> None:
        """Raise ConfigError for invalid values."""
        self._check_admin_key()
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"server cors_origins must be origins such as https://example.org or *, got {origin!r}"
                )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server port must be in [0, 65535], got {self.port}")
        if not self.drain_s >= 0:
            raise ConfigError(f"server drain_s must not be negative, got {self.drain_s}")
        if self.max_body_bytes is not None and self.max_body_bytes < 1024:
            raise ConfigError(f"server max_body_bytes must be at least 1024, got {self.max_body_bytes}")
        if self.max_connections is not None and self.max_connections < 1:
            raise ConfigError(f"server max_connections must be at least 1, got {self.max_connections}")
        for name in ("read_timeout_s", "write_timeout_s", "keep_alive_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"server {name} must be more than 0, got {getattr(self, name)}")

    @property
    def admin_secret(self) -> str | None:
        """The admin key, from either place; None: there is none."""
        return self.admin_key_file if self.admin_key is None else self.admin_key

    def _check_admin_key(self) -> None:
        """Raise ConfigError for a bad admin key; the message never quotes a key."""
        if self.admin_key is not None and self.admin_key_file is not None:
            raise ConfigError("server: write admin_key or admin_key_file, not both")
        secret = self.admin_secret
        if secret is not None and (wrong := secret_problem(secret)):
            raise ConfigError(f"server.admin_key: {wrong}")
        for key in self.named_api_keys():
            if key.key == secret:
                raise ConfigError(f"server.admin_key is also the API key {key.name!r}; they must differ")

    def named_api_keys(self) -> tuple[ApiKey, ...]:
        """All API keys, each with a name."""
        return named_keys(self.api_keys + (self.api_key_file or ()))
