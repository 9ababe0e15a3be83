"""Runs the demo: starts servers, sends each a burst of prompts, prints reports."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console

from shoal.cli.demo.client import Burst, run_burst, time_alone
from shoal.cli.demo.prompts import CHAT, COMPLETE, DemoPrompt, typical_prompts
from shoal.cli.demo.report import DemoReport, comparison, report_notes, report_table, summarise
from shoal.cli.demo.view import BurstView
from shoal.cli.output import STANDARD_OUTPUT, json_text, output_file
from shoal.cli.progress import ProgressDisplay
from shoal.core import EngineDied
from shoal.engine.build import default_threads
from shoal.models import resolve_model

MODELS = {CHAT: "smollm2", COMPLETE: "gemma3-270m"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """What the command line asks for."""

    kv_bytes: int
    """KV memory of a server, of all of its engines together where they are compared."""
    preset: str
    """Scheduler of each engine."""
    kill: bool = False
    """Whether to serve from two engines, each with both models, and to kill one amid the burst."""
    compare: bool = False
    """Whether to send the burst to an engine for each model, too."""

    def together(self) -> str:
        """The configuration of a server whose engine, or whose two engines, have both models."""
        engines = 2 if self.kill else 1
        return self._config(
            devices=["cpu"] * engines,
            kv_cache={"memory": self.kv_bytes},
        )

    def apart(self, threads: int) -> str:
        """The configuration of an engine for each model, which share memory and ``threads`` evenly."""
        one = {"device": "cpu", "threads": max(1, threads // 2), "kv_memory": self.kv_bytes // 2}
        return self._config(
            devices=[{"name": name, **one} for name in MODELS],
            placement={name: [name] for name in MODELS},
        )

    def _config(self, **settings: Any) -> str:
        """A configuration file; JSON is YAML."""
        services = [{"name": name, "model": model} for name, model in MODELS.items()]
        return json.dumps({"services": services, "scheduler": {"preset": self.preset}, **settings}, indent=1)


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


_START_TIMEOUT_S = 300.0


def run_demo(prompts: list[DemoPrompt], setup: DemoSetup, json_path: Path | None) -> bool:
    """Run the demo; returns whether every request finished."""
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    with ProgressDisplay() as progress:
        for model in MODELS.values():
            resolve_model(model, progress.update)
    both = " and ".join(MODELS.values())
    with _interrupted_by_sigterm():
        shared = "two engines" if setup.kill else "one engine"
        with _serving(setup.together()) as url:
            console.print(f"[bold]{both}[/] share {shared} at {url}")
            with ProgressDisplay() as progress:
                progress.message("timing one request of each service alone")
                alone_s = asyncio.run(time_alone(url, typical_prompts(prompts)))
            report = summarise(send_burst(url, prompts, console, alone_s, setup.kill))
        print_report(report, console)
        apart = None
        if setup.compare:
            with _serving(setup.apart(default_threads())) as url:
                console.print(
                    f"\n[bold]{both}[/] have an engine each, with half of cores and memory, at {url}"
                )
                apart = summarise(send_burst(url, prompts, console, alone_s))
            print_report(apart, console)
            console.print()
            for line in comparison(report, apart):
                console.print(line, highlight=False, markup=False)
    if json_path is not None:
        with output_file(json_path) as path:
            compared = {} if apart is None else {"engine_for_each_model": apart.to_json()}
            path.write_text(json_text(report.to_json() | compared), encoding="utf-8")
    return report.succeeded and (apart is None or apart.succeeded)


@contextmanager
def _serving(config: str) -> Iterator[str]:
    """The URL of a server with a configuration, once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "shoal.yaml"
        file.write_text(config, encoding="utf-8")
        with ServerProcess(["--config", str(file)], free_port()) as server:
            with ProgressDisplay() as progress:
                server.wait_ready(
                    _START_TIMEOUT_S, lambda _: progress.message("starting and loading both models")
                )
            yield server.url


def send_burst(
    url: str, prompts: list[DemoPrompt], console: Console, alone_s: Mapping[str, float], kill: bool = False
) -> Burst:
    """Send the prompts to the server at ``url`` and show the responses as they arrive.

    alone_s: time of a request alone, by service. kill: whether to kill an engine meanwhile.
    """
    with BurstView(console, prompts) as view:
        return asyncio.run(run_burst(url, prompts, view.update, alone_s, kill))


def print_report(report: DemoReport, console: Console) -> None:
    """Print the table, its notes and the failures."""
    console.print()
    console.print(report_table(report))
    for note in report_notes(report):
        console.print(note, highlight=False, markup=False)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that the server is stopped."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
