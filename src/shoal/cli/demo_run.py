"""Runs the demo: starts a server, sends a burst of prompts, prints a report."""

import asyncio
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from shoal.cli.demo_client import Burst, run_burst, time_alone
from shoal.cli.demo_prompts import CHAT, COMPLETE, DemoPrompt, demo_prompts, typical_prompts
from shoal.cli.demo_report import DemoReport, report_notes, report_table, summarise
from shoal.cli.demo_server import ServerProcess, free_port
from shoal.cli.demo_view import BurstView
from shoal.cli.output import STANDARD_OUTPUT, json_text, output_file
from shoal.cli.progress import ProgressDisplay
from shoal.models import resolve_model

MODELS = {CHAT: "smollm2", COMPLETE: "gemma3-270m"}
_START_TIMEOUT_S = 300.0


def run_demo(
    requests: int, max_tokens: int, flags: Sequence[str], json_path: Path | None, kill: bool = False
) -> bool:
    """Run the demo with ``flags`` for its server; returns whether every request finished.

    kill: run two engines, and kill one of them amid the burst.
    """
    console = Console(stderr=json_path == STANDARD_OUTPUT)
    with ProgressDisplay() as progress:
        for model in MODELS.values():
            resolve_model(model, progress.update)
    services = [f"--service={name}={model}" for name, model in MODELS.items()]
    devices = ["--device=cpu"] * 2 if kill else []
    with _interrupted_by_sigterm(), ServerProcess([*services, *flags, *devices], free_port()) as server:
        with ProgressDisplay() as progress:
            server.wait_ready(
                _START_TIMEOUT_S, lambda _: progress.message("starting and loading both models")
            )
        engines = "two engines" if kill else "one engine"
        console.print(f"[bold]{' and '.join(MODELS.values())}[/] share {engines} at {server.url}")
        prompts = demo_prompts(requests, max_tokens)
        with ProgressDisplay() as progress:
            progress.message("timing one request of each service alone")
            alone_s = asyncio.run(time_alone(server.url, typical_prompts(prompts)))
        burst = send_burst(server.url, prompts, console, alone_s, kill)
    report = summarise(burst)
    print_report(report, console, json_path)
    return report.succeeded


def send_burst(
    url: str, prompts: list[DemoPrompt], console: Console, alone_s: Mapping[str, float], kill: bool = False
) -> Burst:
    """Send the prompts to the server at ``url`` and show the responses as they arrive.

    alone_s: time of a request alone, by service. kill: whether to kill an engine meanwhile.
    """
    with BurstView(console, prompts) as view:
        return asyncio.run(run_burst(url, prompts, view.update, alone_s, kill))


def print_report(report: DemoReport, console: Console, json_path: Path | None) -> None:
    """Print the table, its notes and the failures; write the JSON to ``json_path`` if given."""
    console.print()
    console.print(report_table(report))
    for note in report_notes(report):
        console.print(note, highlight=False, markup=False)
    for failure in report.failures:
        console.print(f"failed: {failure}", style="red", markup=False, highlight=False)
    if json_path is not None:
        with output_file(json_path) as path:
            path.write_text(json_text(report.to_json()), encoding="utf-8")


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
