"""Running one part of `benchmarks/gpu_check` in a process of its own, until it ends or is out of time."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.cases import NO_DEVICE
from benchmarks.gpu_check.part_list import Part

NO_SUCH_DEVICE = "there is no such device"
"""The reason of a part that could not begin; no other can."""
_CHILD = "benchmarks.gpu_check.child"
_POLL_S = 0.1
_DEATH_S = 3.0
"""A killed process that is inside the driver may take a while, or never end."""
_RESTART_S = 10.0
"""With less time left a part whose process died is not started again."""
_LOG_CHARACTERS = 4000
_WORST_FIRST = ("failed", "cut", "ok", "left out")

Record = Mapping[str, Any]


@dataclass
class Done:
    """What came of a part.

    state: ok, failed, cut (no time for all of it) or left out. cases: what its cases told. reason: why it was
    left out, or ended early. log: the end of what its processes printed, where not all is well.
    """

    part: Part
    state: str = "left out"
    seconds: float = 0.0
    cases: list[Record] = field(default_factory=list)
    reason: str | None = None
    log: str = ""


@dataclass(frozen=True)
class Setting:
    """What is the same for all parts: where to compute, whether shapes are tiny, and the environment."""

    device: str
    tiny: bool
    environment: Mapping[str, str]


def run_part(done: Done, limit_s: float, setting: Setting, told: Callable[[], None]) -> None:
    """Run the part of ``done``, which is filled meanwhile; told: is called whenever more is known."""
    started = time.monotonic()
    done.state, done.reason = "cut", "interrupted"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        run = _Run(done, Path(folder), started + limit_s, setting, told)
        try:
            while run.once():
                pass
        finally:
            done.seconds = time.monotonic() - started
            done.log = "" if done.state == "ok" else run.log()


class _Run:
    def __init__(
        self, done: Done, folder: Path, ends_s: float, setting: Setting, told: Callable[[], None]
    ) -> None:
        self._done = done
        self._records, self._output = folder / "records", folder / "output"
        self._records.touch()
        self._output.touch()
        self._ends_s = ends_s
        self._setting = setting
        self._told = told

    def once(self) -> bool:
        """One process from its start to its end; whether another is to go on where it died."""
        before = self._begun()
        child = self._start(before)
        try:
            status = self._watch(child)
        finally:
            gone = kill_group(child)
            self._read()
        if status is None:
            self._end("cut", "its time was over" if gone else "its time was over, and it cannot be killed")
        elif status == NO_DEVICE:
            self._end("failed", NO_SUCH_DEVICE)
        elif status == 0:
            self._end("ok", None)
        else:
            return self._goes_on(f"signal {-status}" if status < 0 else f"status {status}", before)
        return False

    def _start(self, begun: Sequence[str]) -> "subprocess.Popen[bytes]":
        wanted = {
            "module": self._done.part.module,
            "device": self._setting.device,
            "tiny": self._setting.tiny,
            "ends_s": self._ends_s,
            "records": str(self._records),
            "begun": begun,
        }
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", _CHILD, json.dumps(wanted)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._setting.environment),
                start_new_session=True,
            )

    def _goes_on(self, how: str, before: Sequence[str]) -> bool:
        """A process ended by itself, and too early; whether another is to go on with the next case."""
        begun = self._begun()
        ended = {record["case"] for record in self._lines() if "case" in record}
        for name in begun:
            if name not in ended:
                self._write(_failed(name, f"the process ended with {how}"))
        self._read()
        if len(begun) > len(before) and self._ends_s - time.monotonic() > _RESTART_S:
            return True
        last = (self.log().strip().splitlines() or [""])[-1]
        self._end("failed", f"its process ended with {how}: {last}")
        return False

    def _end(self, state: str, reason: str | None) -> None:
        """The worst of how the process ended and what its cases told."""
        states = {case["state"] for case in self._done.cases} or {"ok"}
        if state != "ok":
            states.add(state)
        self._done.state = next(each for each in _WORST_FIRST if each in states)
        self._done.reason = reason
        self._told()

    def _watch(self, child: "subprocess.Popen[bytes]") -> int | None:
        """Its exit status; None where its time is over first."""
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self._read():
                    self._told()
                if time.monotonic() > self._ends_s:
                    return None

    def _read(self) -> bool:
        """Read what was told; whether that is more than before."""
        before = len(self._done.cases)
        self._done.cases = [record for record in self._lines() if "case" in record]
        return len(self._done.cases) > before

    def _lines(self) -> list[Record]:
        # The last line may be half written.
        whole = self._records.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def _begun(self) -> list[str]:
        return [record["begin"] for record in self._lines() if "begin" in record]

    def _write(self, record: Record) -> None:
        with self._records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def log(self) -> str:
        """The end of what the processes printed."""
        return self._output.read_text(errors="replace")[-_LOG_CHARACTERS:]


def _failed(name: str, error: str) -> Record:
    return {"case": name, "state": "failed", "seconds": 0.0, "figures": {}, "error": error, "line": None}


def kill_group(leader: "subprocess.Popen[bytes]") -> bool:
    """Kill what is left of the process group that ``leader`` leads; whether ``leader`` is gone."""
    ends_s = time.monotonic() + _DEATH_S
    while time.monotonic() < ends_s:
        leader.poll()
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(_POLL_S / 5)
    return leader.poll() is not None
