"""What a GPU does, and this code on it, in eight minutes: one command, one line for each part.

    python -m benchmarks.gpu_check                          # all parts, on cuda:0
    python -m benchmarks.gpu_check --json gpu.json          # all that was measured, written as it grows
    python -m benchmarks.gpu_check --only kernels tests     # some of them
    python -m benchmarks.gpu_check --list                   # what there is
    python -m benchmarks.gpu_check --cpu                    # a dry run on the CPU, with tiny shapes

Every part has a process of its own and a time limit, after which it is killed with its children; what it has
measured until then counts. An error ends a case of a part, not the others. Where it leaves the device of no
use to a process, or ends the process, another goes on with the next case. Parts that do not fit into
`--seconds` are left out; those that are worth more come first. At the end come Markdown tables, as they
stand in docs/benchmarks.md. The exit status is 1 where something failed.

It needs torch and triton, and for most parts some more packages, but no network and no files of a model:
models have the shapes of known ones and random weights. It says which packages are missing; wheels of them
in a folder can be used with `--wheels FOLDER`. Shoal itself need not be installed.
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
from benchmarks.gpu_check.run import NO_SUCH_DEVICE, Done, Setting, run_part
from benchmarks.interrupted import shown_at_end

_LEAST_SHARE = 0.4
"""A part is left out where less than this of its time is left."""
_ASK_S = 10.0


def main(arguments: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    options = _options(arguments, parts)
    if options.list:
        for part in parts:
            print(f"{part.name:<8} {part.seconds:4.0f} s  {part.does}")
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    chosen = [part for part in parts if not options.only or part.name in options.only]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        check = Check(options, chosen, Path(folder))
        with shown_at_end(check.finish):
            check.run()
    return 1 if any(done.state == "failed" for done in check.parts) else 0


def _options(arguments: Sequence[str] | None, parts: Sequence[Part]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", type=int, default=0, metavar="NUMBER")
    parser.add_argument("--cpu", action="store_true", help="a dry run: every part on the CPU, tiny")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in parts], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="name the parts, and end")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=480, help="for all parts together")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of packages that are not installed")
    return parser.parse_args(arguments)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Check:
    """All parts, one after the other. folder: for files that are of no use afterwards."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Part], folder: Path) -> None:
        self.parts: list[Done] = []
        """What came of them."""
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
        """Run all parts that there is time for."""
        print(", ".join(f"{name} {value}" for name, value in self._about.items()), flush=True)
        self._name_missing()
        for number, part in enumerate(self._chosen):
            done = Done(part, reason=self._left_out(part))
            self.parts.append(done)
            if done.reason is None:
                run_part(done, self._limit_s(number), self._setting, self._write)
            print(line_of(done), flush=True)
            self._write()

    def finish(self) -> None:
        """Show everything."""
        self._write()
        print(f"\n{tables(self._about, self.parts)}", flush=True)

    def _name_missing(self) -> None:
        lacking = missing(
            dict.fromkeys(name for part in self._chosen for name in part.needs + part.does_without)
        )
        if lacking:
            print(f"missing here: {' '.join(wheels(lacking))} (--wheels FOLDER installs them)", flush=True)

    def _left_out(self, part: Part) -> str | None:
        """Why a part cannot be run, if so."""
        if any(done.reason == NO_SUCH_DEVICE for done in self.parts):
            return NO_SUCH_DEVICE
        if lacking := missing(part.needs):
            return f"it needs {' '.join(wheels(lacking))}"
        left_s = self._ends_s - time.monotonic()
        return f"only {left_s:.0f} s were left" if left_s < _LEAST_SHARE * part.seconds else None

    def _limit_s(self, number: int) -> float:
        """A part's own time, or more where those to come leave more."""
        left_s = self._ends_s - time.monotonic()
        unclaimed_s = left_s - sum(part.seconds for part in self._chosen[number + 1 :])
        return max(min(self._chosen[number].seconds, left_s), unclaimed_s)

    def _write(self) -> None:
        if self._options.json is not None:
            write_json(self._options.json, self._about, self.parts)


def about(gpu: str | None) -> dict[str, str]:
    """What is measured, and with what. gpu: its name for the driver; None: a CPU."""
    facts = {"device": "cpu"} if gpu is None else {"card": card(gpu)}
    facts["python"] = platform.python_version()
    for name in ("torch", "triton", "transformers", "numpy"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "missing"
    facts["commit"] = _answer(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]) or "unknown"
    return facts


def card(gpu: str) -> str:
    """The card's name and driver, as the driver's own program says them: torch may be what does not work."""
    asked = "--query-gpu=name,driver_version"
    return _answer(["nvidia-smi", f"--id={gpu}", asked, "--format=csv,noheader"]) or "unknown"


def _answer(command: Sequence[str]) -> str:
    """The first line that a program prints; nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return next(iter(done.stdout.splitlines()), "")


if __name__ == "__main__":
    sys.exit(main())
