"""Builds engines with fake models whose loading or whose tenth step does something else, once.

What they do is in the fragment of the first service's model, and a file that says that it was done before, as
in "fake#step-waits,/tmp/reached".
"""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from engine_builders import build_fake

from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo
from shoal.engine.options import EngineOptions

BUILDER = "hanging_engine:build_hanging"
STEP = 10
COMPUTED_S = 0.5
"""CPU time of what computes for long."""
_COMPUTING = f"""
import sys, time
while time.process_time() < {COMPUTED_S}:
    pass
sys.stdin.read()
"""


def build_hanging(
    options: EngineOptions, folders: Mapping[str, Path], *, progress=None
) -> tuple[Engine, EngineInfo]:
    """As ``build_fake``."""
    what, _, reached = options.services[0].model.partition("#")[2].partition(",")
    when, _, how = what.partition("-")
    do = {"waits": _wait, "circles": _circle, "computes": _compute, "delegates": _delegate}[how]
    if when == "load":
        _once(reached, do)
    engine, info = build_fake(options, folders, progress=progress)
    if when == "step":
        _replace_step(engine, lambda: _once(reached, do))
    return engine, info


def _replace_step(engine: Engine, do: Callable[[], None]) -> None:
    executor = engine.fake_executor
    collect = executor.collect
    steps = 0

    def collecting():
        nonlocal steps
        steps += 1
        if steps == STEP:
            do()
        return collect()

    executor.collect = collecting


def _once(reached: str, do: Callable[[], None]) -> None:
    if not Path(reached).exists():
        Path(reached).touch()
        do()


def _wait() -> None:
    threading.Event().wait()


def _circle() -> None:
    while True:
        pass


def _compute() -> None:
    until_s = time.thread_time() + COMPUTED_S
    while time.thread_time() < until_s:
        pass


def _delegate() -> None:
    """Wait for a child that waits for another, which computes; both end with this process."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_COMPUTING!r}])"
    subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE).wait()
