"""The demo's server: ``shoal serve`` in a child process that ends with the demo."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

import httpx

from shoal.core import EngineDied

_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2


def free_port() -> int:
    """A loopback port that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """Runs ``python -m shoal.cli serve ARGUMENTS`` inside a ``with`` block.

    command: replaces the part before the arguments, for tests.
    """

    def __init__(self, arguments: Sequence[str], port: int, command: Sequence[str] | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        # The child ends with this process, even if this is killed.
        program = command or (sys.executable, "-m", "shoal.models.run_child", "shoal.cli", "serve")
        self._command = [*program, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        """Start the server without waiting for it."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server and its child processes."""
        process = self._process
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._log.close()

    @property
    def pid(self) -> int:
        """The server's process id."""
        assert self._process is not None, "the server runs only inside a with block"
        return self._process.pid

    def wait_ready(self, timeout_s: float, tick: Callable[[float], Any] | None = None) -> None:
        """Wait until /health is OK; raises EngineDied with the server's output if it does not get there.

        tick: called with the seconds waited so far.
        """
        start_s = time.monotonic()
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while True:
                waited_s = time.monotonic() - start_s
                if self._process is None or self._process.poll() is not None:
                    raise EngineDied(f"the server ended before it was ready; it printed:\n{self.log_tail()}")
                if waited_s > timeout_s:
                    raise EngineDied(
                        f"the server was not ready after {timeout_s:.0f} s; it printed:\n{self.log_tail()}"
                    )
                with suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").status_code == httpx.codes.OK:
                        return
                if tick:
                    tick(waited_s)
                time.sleep(_POLL_S)

    def log_tail(self, lines: int = 15) -> str:
        """The last lines that the server printed."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-lines:])
