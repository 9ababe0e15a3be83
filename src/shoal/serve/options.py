"""Options of the HTTP server."""

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
    """Options of the HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on; 0 takes a free one."""
    drain_s: float = 30.0
    """Time that running requests have after the first SIGTERM or SIGINT."""
    max_body_bytes: int | None = None
    """Largest request body; a larger one gets a 413. None: 64 bytes for each token of the longest context,
    and at least 1 MiB."""
    log_level: LogLevel = "info"
    """Least severity of what is logged; the access log has its own switch."""
    access_log: bool = False
    """Print a line for each request."""
    access_log_format: LogFormat = "text"
    """What such a line is."""
    vllm_metrics: bool = False
    """Also show metrics under vLLM's names."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names that the Host header may have, with any port; "*" allows all. None: on a loopback address its own
    names, else all."""
    api_keys: tuple[ApiKey, ...] = ()
    """Keys that clients must send; none here and in api_key_file: they need none."""
    api_key_file: tuple[ApiKey, ...] | None = None
    """Further keys, from a file."""
    admin_key: str | None = field(default=None, repr=False)
    """Key of the operators' routes; none here and in admin_key_file: they answer only this machine,
    and nobody where there are API keys."""
    admin_key_file: str | None = field(default=None, repr=False)
    """The same, from a file."""
    unknown_fields: Literal["ignore", "refuse"] = "ignore"
    """What becomes of fields of requests that are not known here and cannot be meant for known ones."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that browsers let read responses; "*": all. None here: those of no other site."""
    max_connections: int | None = None
    """Most open connections; further ones get a 503. None: as many as the process may open files, and at most
    4096."""
    read_timeout_s: float = 20.0
    """Time that a client has for the headers of a request, and then for its body. Every KiB of the body adds
    a second, up to this time."""
    write_timeout_s: float = 30.0
    """Time that a client has to read what was written. Every KiB that it reads adds a second, up to this
    time."""
    # Longer than clients keep idle connections, so that the clients close them first.
    keep_alive_s: float = 75.0
    """Time that a connection is kept open after a response."""

    def __post_init__(self) -> None:
        """Check the values; raises ConfigError."""
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
        """The admin key, if there is one."""
        return self.admin_key_file if self.admin_key is None else self.admin_key

    def _check_admin_key(self) -> None:
        """Raise ConfigError, which never quotes a key."""
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
