"""Runs the demo: starts servers, sends each a burst of prompts, prints reports."""

import asyncio
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from shoal.cli.demo_client import Burst, run_burst, time_alone
from shoal.cli.demo_prompts import DemoPrompt, typical_prompts
from shoal.cli.demo_report import DemoReport, comparison, report_notes, report_table, summarise
from shoal.cli.demo_server import ServerProcess, free_port
from shoal.cli.demo_setup import MODELS, DemoSetup
from shoal.cli.demo_view import BurstView
from shoal.cli.output import STANDARD_OUTPUT, json_text, output_file
from shoal.cli.progress import ProgressDisplay
from shoal.engine.build import default_threads
from shoal.models import resolve_model

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
