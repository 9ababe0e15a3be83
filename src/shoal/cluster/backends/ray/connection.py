"""Connects this process to a Ray cluster."""

import asyncio
import contextlib
import logging
import os
import signal
import threading

import ray

from shoal.core import ConfigError

_CONNECT_S = 5.0


async def connect(address: str) -> bool:
    """Connect to the cluster at "host:port" or "auto"; False if this process was connected already.

    Raises ConfigError if there is no cluster.
    """
    if ray.is_initialized():
        return False
    if address != "auto":
        await _check_reachable(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)  # for logs before it reads its arguments
    try:
        # In a thread: it waits for answers, and in the main thread it would take SIGTERM for itself.
        await asyncio.to_thread(
            ray.init,
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"cluster.address: no connection to a Ray cluster at {address!r} ({error}); "
            "`ray start --head` starts one"
        ) from error
    _restore_sigterm_handler()
    return True


def _restore_sigterm_handler() -> None:
    """Replace Ray's native handler of SIGTERM, which prints a stack trace."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def disconnect() -> None:
    ray.shutdown()


async def _check_reachable(address: str) -> None:
    """Fail early: Ray itself tries for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(f"cluster.address must be host:port or auto, got {address!r}")
    try:
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _CONNECT_S)
    except (OSError, TimeoutError) as error:
        raise ConfigError(
            f"cluster.address: nothing answers at {address} ({error or 'no answer'}); "
            "`ray start --head` starts a Ray cluster"
        ) from error
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
