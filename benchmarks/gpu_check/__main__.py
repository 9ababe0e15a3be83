"""Checks correctness and speed on a GPU in eight minutes, in parts with a time limit each.

    python -m benchmarks.gpu_check                          # all parts, on cuda:0
    python -m benchmarks.gpu_check --json gpu.json          # all measurements, written as they come
    python -m benchmarks.gpu_check --only kernels tests     # some parts
    python -m benchmarks.gpu_check --list                   # names of the parts
    python -m benchmarks.gpu_check --cpu                    # dry run on the CPU with tiny shapes

Each part runs in its own process; at its time limit the process and its children are killed, and the
measurements so far count. An error fails one case. If it leaves the device unusable for the process, or ends
the process, a new process continues with the next case. Parts run by importance; parts that do not fit into
`--seconds` are left out. It ends with Markdown tables, as in docs/benchmarks.md, and with exit status 1 if
something failed.

It needs torch and triton, and for most parts more packages, but no network and no model files: models have
known shapes and random weights. It names missing packages; `--wheels FOLDER` installs them from a folder.
Shoal itself need not be installed.
"""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType

from benchmarks.gpu_check.part_list import PARTS, ROOT, Part, environment, install, missing, visible, wheels
from benchmarks.gpu_check.report import line_of, tables, write_json
from benchmarks.gpu_check.run import NO_SUCH_DEVICE, PartResult, Setting, run_part
from benchmarks.interrupts import show_at_end

_LEAST_SHARE = 0.4
"""A part is left out if less than this share of its time is left."""
_QUERY_S = 10.0


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    options = _options(arguments, parts)
    if options.list:
        for part in parts:
            print(f"{part.name:<8} {part.seconds:4.0f} s  {part.description}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = [part for part in parts if not options.only or part.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, chosen, Path(folder))
        with show_at_end(check.finish):
            check.run()
    return 1 if any(result.state == "failed" for result in check.parts) else 0


def _options(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="NUMBER")
    parser.add_argument("--cpu", action="store_true", help="dry run: every part on the CPU, with tiny shapes")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="with wheels of missing packages")
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Check:
    """Runs the parts one after another. folder: for temporary files."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Part], folder: Path) -> None:
        self.parts: list[PartResult] = []
        self._options = options
        self._gpu = None if options.cpu else visible(os.environ, options.gpu)
        self._chosen = chosen
        self._ends_s: float = time.monotonic() + options.seconds
        site = folder / "site"
        if options.wheels is not None:
            install(options.wheels, site)
            sys.path.insert(0, str(site))
        self._about = about(self._gpu)
        folders = [site] if site.exists() else []
        self._setting = Setting(
            "cpu" if options.cpu else "cuda:0",
            options.cpu,
            environment(os.environ, gpu=self._gpu, folders=folders, cache=folder / "triton"),
        )

    def run(self) -> None:
        """Run the parts, and leave out those without time, packages or device."""
        print(", ".join(f"{name} {value}" for name, value in self._about.items()), flush=True)
        self._print_missing()
        for number, part in enumerate(self._chosen):
            result = PartResult(part, reason=self._reason_to_skip(part))
            self.parts.append(result)
            if result.reason is None:
                run_part(result, self._limit_s(number), self._setting, self._write)
            print(line_of(result), flush=True)
            self._write()

    def finish(self) -> None:
        """Write the file and print the tables."""
        self._write()
        print(f"\n{tables(self._about, self.parts)}", flush=True)

    def _print_missing(self) -> None:
        lacking = missing(dict.fromkeys(name for part in self._chosen for name in part.needs + part.optional))
        if lacking:
            print(f"missing here: {' '.join(wheels(lacking))} (--wheels FOLDER installs them)", flush=True)

    def _reason_to_skip(self, part: Part) -> str | None:
        """Reason for leaving a part out; None: run it."""
        if any(result.reason == NO_SUCH_DEVICE for result in self.parts):
            return NO_SUCH_DEVICE
        if lacking := missing(part.needs):
            return f"it needs {' '.join(wheels(lacking))}"
        left_s = self._ends_s - time.monotonic()
        return f"only {left_s:.0f} s were left" if left_s < _LEAST_SHARE * part.seconds else None

    def _limit_s(self, number: int) -> float:
        """The part's own time, or all that later parts leave."""
        left_s = self._ends_s - time.monotonic()
        unclaimed_s = left_s - sum(part.seconds for part in self._chosen[number + 1 :])
        return max(min(self._chosen[number].seconds, left_s), unclaimed_s)

    def _write(self) -> None:
        if self._options.json is not None:
            write_json(self._options.json, self._about, self.parts)


def about(gpu: str | None) -> dict[str, str]:
    """The card and versions. gpu: the driver's name for it; None: a CPU."""
    facts = {"device": "cpu"} if gpu is None else {"card": card(gpu)}
    facts["python"] = platform.python_version()
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    facts["commit"] = _first_line(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) or "unknown"
    return facts


def card(gpu: str) -> str:
    """The card's name and driver by nvidia-smi, since torch may not work."""
    query = "--query-gpu=name,driver_version"
    return _first_line(["nvidia-smi", f"--id={gpu}", query, "--format=csv,noheader"]) or "unknown"


def _first_line(command: Sequence[str]) -> str:
    """The first line of a program's output; "" if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


if __name__ == "__main__":
    sys.exit(main())
