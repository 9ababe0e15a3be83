"""Faulty parts for tests of `benchmarks.gpu_check`."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

SOURCES = {
    "fine": """
def run(cases):
    cases.run("one", lambda: {"ms": 1.5, "of": cases.device}, line="{ms:.1f} ms")
""",
    "raises": """
def run(cases):
    cases.run("wrong", lambda: 1 / 0)
    cases.run("right", lambda: {"ms": 2.0}, line="right anyway")
""",
    "no_cases": """
def run(cases):
    raise OSError("no room")
""",
    # Its processes note the cases that they run.
    "dies": """
import os, signal
from pathlib import Path

def note(name, dies=False):
    with Path("noted").open("a") as file:
        file.write(name + "\\n")
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)

def run(cases):
    cases.run("before", lambda: note("before"))
    cases.run("deadly", lambda: note("deadly", dies=True))
    cases.run("after", lambda: note("after"))
""",
    # It has recorded a case, and has a long-running child.
    "hangs": """
import subprocess, threading
from pathlib import Path

def hang():
    child = subprocess.Popen(["sleep", "1000"])
    Path("child.partial").write_text(str(child.pid))
    Path("child.partial").rename("child")
    threading.Event().wait()

def run(cases):
    cases.run("quick", lambda: {"ms": 3.0}, line="{ms:.0f} ms")
    cases.run("endless", hang)
""",
    "not_here": """
from benchmarks.gpu_check.cases import SkipCase

def run(cases):
    def measure():
        raise SkipCase("too small a device")
    cases.run("large", measure)
""",
    "short_of_time": """
def run(cases):
    cases.run("long", lambda: None, seconds=1e9)
    cases.run("short", lambda: {"ms": 4.0})
""",
    "imports": """
import a_tiny_package

def run(cases):
    cases.run("one", lambda: {"value": a_tiny_package.VALUE}, line="{value}")
""",
}

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.gpu_check.__main__ import main
from benchmarks.gpu_check.part_list import Part
PARTS = [{parts}]
sys.exit(main(sys.argv[1:], PARTS))
"""


def write_check(folder: Path, *names: str, seconds: float = 100, needs: tuple[str, ...] = ()) -> list[str]:
    """A command that runs these parts in ``folder``; further arguments may follow."""
    for name in names:
        (folder / f"part_{name}.py").write_text(SOURCES[name])
    parts = ", ".join(f"Part({n!r}, 'what is {n}', 'part_{n}', {seconds}, {needs!r})" for n in names)
    script = folder / "check.py"
    script.write_text(SCRIPT.format(root=str(ROOT), parts=parts))
    return [sys.executable, str(script), "--cpu"]


def environment_of(folder: Path) -> dict[str, str]:
    """Environment in which parts are imported from ``folder``."""
    paths = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
