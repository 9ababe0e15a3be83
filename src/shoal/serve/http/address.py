"""The server's listening socket, and the limit of open connections."""

import errno
import resource
import socket

import psutil

from shoal.core import ConfigError
from shoal.serve.options import ServerOptions

_MAX_CONNECTIONS = 4096
# File descriptors for worker processes, engines and files.
_RESERVED_FILES = 32


def connection_limit(configured: int | None) -> int:
    """Most connections at once: ``configured``, or as many as the process can open.

    Raises ConfigError if ``configured`` is more than that, or if the process can open none.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return configured or _MAX_CONNECTIONS
    available = soft - psutil.Process().num_fds() - _RESERVED_FILES
    if available < (configured or 1):
        raise ConfigError(
            f"the process may open {soft} files, which allows {max(0, available)} connections and not "
            f"{configured or 'any'} (server.max_connections); raise the limit with `ulimit -n`"
        )
    return configured or min(available, _MAX_CONNECTIONS)


def check_address(options: ServerOptions) -> None:
    """Raise ConfigError if the server cannot listen on its address, or open its connections."""
    connection_limit(options.max_connections)
    listen(options).close()


def listen(options: ServerOptions) -> socket.socket:
    """A socket that listens on the server's address; raises ConfigError if that is impossible."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        return socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"{where} is in use; choose another port, or 0 for a free one") from None
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}") from None
