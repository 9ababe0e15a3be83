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
    allowed_hosts: names, with any port, that ``Host`` may have; "*" allows all. None: on a loopback address
    its own names, else all.
    max_connections: open connections; further ones get a 503. None: as many as the process may open files,
    and at most 4096.
    read_timeout_s: how long a client may take for the headers of a request, and then for its body; every KiB
    of the body wins a second.
    write_timeout_s: how long a client may take nothing of what is written; every KiB wins a second.
    keep_alive_s: how long a connection is kept open after an answer.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0
    max_body_bytes: int | None = None
    access_log: bool = False
    allowed_hosts: tuple[str, ...] | None = None
    max_connections: int | None = None
    read_timeout_s: float = 20.0
    write_timeout_s: float = 30.0
    # Longer than clients keep idle connections, so that these close them and not we under their hands.
    keep_alive_s: float = 75.0

    def __post_init__(self) -> None:
        """Refuse values that have no meaning; raises ConfigError."""
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
