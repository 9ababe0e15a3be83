"""What a user can choose about the HTTP server."""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options of the HTTP server.

    host, port: address to listen on; port 0 takes a free one.
    drain_s: after the first SIGTERM or SIGINT, how long requests in progress may go on, in seconds.
    max_body_bytes: largest request body that is read; a larger one gets a 413. None: 64 bytes for each
    token of the longest context, and at least 1 MiB.
    access_log: print a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    max_body_bytes: int | None = None
    access_log: bool = False

    def __post_init__(self) -> None:
        """Refuse values that have no meaning; raises ConfigError."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server port must be in [0, 65535], got {self.port}")
        if not self.drain_s >= 0:
            raise ConfigError(f"server drain_s must not be negative, got {self.drain_s}")
        if self.max_body_bytes is not None and self.max_body_bytes < 1024:
            raise ConfigError(f"server max_body_bytes must be at least 1024, got {self.max_body_bytes}")
