"""Steps of the demo: starts servers, sends each a burst of prompts, prints reports."""

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
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from rich.console import Console

from shoal.cli.demo.client import Burst, make_burst, run_burst, time_alone
from shoal.cli.demo.prompts import CHAT, COMPLETE, DemoPrompt, typical_prompts
from shoal.cli.demo.report import DemoReport, comparison, report_notes, report_table, summarise
from shoal.cli.demo.view import BurstView
from shoal.cli.output import STANDARD_OUTPUT, json_text, output_file
from shoal.cli.progress import ProgressDisplay
from shoal.core import EngineDied
from shoal.engine.build import default_threads
from shoal.models import resolve_model

MODELS = {CHAT: "smollm2", COMPLETE: "gemma3-270m"}
SEPARATE, TIGHT = "engine_for_each_model", "one_model_in_memory"
"""Keys of the JSON for the servers that the burst is sent to afterwards."""
ONE_MODEL_BYTES = 700 << 20
"""Memory for the weights of the larger of the models, but not for both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """Options of the demo, and the configurations of its servers."""

    kv_bytes: int
    """KV memory of a server; with an engine for each model, divided between them."""
    preset: str
    """Scheduler of each engine."""
    weight_bytes: int | None = None
    """Memory for weights of an engine with both models; None: for all."""
    kill: bool = False
    """Whether to serve from two engines, each with both models, and to kill one during the burst."""
    compare: bool = False
    """Whether to send the burst to an engine for each model, too, and to one that holds one at a time."""

    def shared_config(self) -> str:
        """Configuration of a server whose engine has both models; with ``kill``, two such engines."""
        engines = 2 if self.kill else 1
        return self._config(
            devices=["cpu"] * engines,
            kv_cache={"memory": self.kv_bytes},
            weights={"memory": self.weight_bytes},
        )

    def tight_config(self) -> str:
        """As ``shared_config``, with memory for the weights of one model at a time."""
        return replace(self, weight_bytes=ONE_MODEL_BYTES).shared_config()

    def separate_config(self, threads: int) -> str:
        """Configuration of a server with an engine for each model, with half of memory and ``threads``."""
        one = {"device": "cpu", "threads": max(1, threads // 2), "kv_memory": self.kv_bytes // 2}
        return self._config(
            devices=[{"name": name, **one} for name in MODELS],
            placement={name: [name] for name in MODELS},
        )

    def _config(self, **settings: Any) -> str:
        # JSON is YAML.
        services = [{"name": name, "model": model} for name, model in MODELS.items()]
        return json.dumps({"services": services, "scheduler": {"preset": self.preset}, **settings}, indent=1)


_STOP_TIMEOUT_S = 15.0
_POLL_S = 0.2


def free_port() -> int:
    """A free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """Runs ``python -m shoal.cli serve ARGUMENTS`` inside a ``with`` block.

    command: replaces the part before the arguments, for tests.
    """

    def __init__(self, arguments: Sequence[str], port: int, command: Sequence[str] | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        # ``run_child`` ends the child with this process, even if this is killed.
        program = command or (sys.executable, "-m", "shoal.models.run_child", "shoal.cli", "serve")
        self._command = [*program, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by __exit__)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServerProcess":
        """Start the server; ``wait_ready`` waits for it."""
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
        assert self._process is not None, "the server runs only inside a with block"
        return self._process.pid

    def wait_ready(self, timeout_s: float, tick: Callable[[float], Any] | None = None) -> None:
        """Wait until /health is OK; raises EngineDied with the server's output if it ends or takes too long.

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
    with _sigterm_as_interrupt():
        shared = "two engines" if setup.kill else "one engine"
        with _serving(setup.shared_config()) as url:
            console.print(f"[bold]{both}[/] share {shared} at {url}")
            with ProgressDisplay() as progress:
                progress.message("timing one request of each service alone")
                alone_s = asyncio.run(time_alone(url, typical_prompts(prompts)))
            report = summarise(send_burst(url, prompts, console, alone_s, setup.kill))
        print_report(report, console)
        others: dict[str, DemoReport] = {}
        for key, (what, config) in _comparisons(setup).items():
            with _serving(config) as url:
                console.print(f"\n[bold]{both}[/] {what}, at {url}")
                others[key] = summarise(send_burst(url, prompts, console, alone_s))
            print_report(others[key], console)
        if others:
            console.print()
            for line in comparison(
                report, others["engine_for_each_model"], others.get("one_model_in_memory")
            ):
                console.print(line, highlight=False, markup=False)
    if json_path is not None:
        with output_file(json_path) as path:
            compared = {key: each.to_json() for key, each in others.items()}
            path.write_text(json_text(report.to_json() | compared), encoding="utf-8")
    return report.succeeded and all(each.succeeded for each in others.values())


def _comparisons(setup: DemoSetup) -> dict[str, tuple[str, str]]:
    """Servers that get the same burst, by key of the JSON: what they have, and their configurations."""
    if not setup.compare:
        return {}
    separate = (
        "have an engine each, with half of cores and memory",
        setup.separate_config(default_threads()),
    )
    found = {"engine_for_each_model": separate}
    if setup.weight_bytes is None:
        tight = ("share one engine, whose memory holds the weights of one at a time", setup.tight_config())
        found["one_model_in_memory"] = tight
    return found


@contextmanager
def _serving(config: str) -> Iterator[str]:
    """Run a server with a configuration (YAML); yields its URL when it is ready."""
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

    alone_s: time of a request alone, by service. kill: whether to kill an engine during the burst.
    """
    burst = make_burst(prompts, alone_s)
    with BurstView(console, burst.requests) as view:
        asyncio.run(run_burst(url, burst, view.show_end, kill))
    return burst


def print_report(report: DemoReport, console: Console) -> None:
    """Print the table, its notes and the failures."""
    console.print()
    console.print(report_table(report))
    for note in report_notes(report):
        console.print(note, highlight=False, markup=False)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in the block, so that the server is stopped."""
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
