"""Runs a part of `benchmarks.gpu_check` in its own process, with a time limit and restarts after crashes."""

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
"""Reason of a part that could not start; later parts are then left out."""
_CHILD = "benchmarks.gpu_check.child"
_POLL_S = 0.1
_DEATH_S = 3.0
"""Time for a killed process to end; inside the driver it may take long or forever."""
_RESTART_S = 10.0
"""Least time left for restarting a part whose process died."""
_LOG_CHARACTERS = 4000
_WORST_FIRST = ("failed", "cut", "ok", "left out")

Record = Mapping[str, Any]


@dataclass
class PartResult:
    """Result of a part.

    state: ok, failed, cut (out of time) or left out. cases: records. reason: for being left out or ending
    early. log: the end of its processes' output, unless it is ok.
    """

    part: Part
    state: str = "left out"
    seconds: float = 0.0
    cases: list[Record] = field(default_factory=list)
    reason: str | None = None
    log: str = ""


@dataclass(frozen=True)
class Setting:
    """Settings of all parts. tiny: use tiny shapes. environment: of their processes."""

    device: str
    tiny: bool
    environment: Mapping[str, str]


def run_part(result: PartResult, limit_s: float, setting: Setting, on_update: Callable[[], None]) -> None:
    """Run the part of ``result``, and fill it; on_update: called after each new record."""
    started = time.monotonic()
    result.state, result.reason = "cut", "interrupted"
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        run = _Run(result, Path(folder), started + limit_s, setting, on_update)
        try:
            while run.once():
                pass
        finally:
            result.seconds = time.monotonic() - started
            result.log = "" if result.state == "ok" else run.log()


class _Run:
    def __init__(
        self, result: PartResult, folder: Path, ends_s: float, setting: Setting, on_update: Callable[[], None]
    ) -> None:
        self._result = result
        self._records, self._output = folder / "records", folder / "output"
        self._records.touch()
        self._output.touch()
        self._ends_s = ends_s
        self._setting = setting
        self._on_update = on_update

    def once(self) -> bool:
        """Run one process to its end; whether to start another after the case that killed it."""
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
            return self._continue_after(f"signal {-status}" if status < 0 else f"status {status}", before)
        return False

    def _start(self, begun: Sequence[str]) -> "subprocess.Popen[bytes]":
        job = {
            "module": self._result.part.module,
            "device": self._setting.device,
            "tiny": self._setting.tiny,
            "ends_s": self._ends_s,
            "records": str(self._records),
            "begun": begun,
        }
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", _CHILD, json.dumps(job)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(self._setting.environment),
                start_new_session=True,
            )

    def _continue_after(self, how: str, before: Sequence[str]) -> bool:
        """Handle a process that ended too early; whether to continue with the next case in another."""
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
        """Set the worst state of the process and its cases."""
        states = {case["state"] for case in self._result.cases} or {"ok"}
        if state != "ok":
            states.add(state)
        self._result.state = next(each for each in _WORST_FIRST if each in states)
        self._result.reason = reason
        self._on_update()

    def _watch(self, child: "subprocess.Popen[bytes]") -> int | None:
        """The exit status; None: out of time."""
        while True:
            try:
                return child.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                if self._read():
                    self._on_update()
                if time.monotonic() > self._ends_s:
                    return None

    def _read(self) -> bool:
        """Read the records; whether there are new ones."""
        before = len(self._result.cases)
        self._result.cases = [record for record in self._lines() if "case" in record]
        return len(self._result.cases) > before

    def _lines(self) -> list[Record]:
        # The last line may be incomplete.
        whole = self._records.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def _begun(self) -> list[str]:
        return [record["begin"] for record in self._lines() if "begin" in record]

    def _write(self, record: Record) -> None:
        with self._records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def log(self) -> str:
        """The end of the processes' output."""
        return self._output.read_text(errors="replace")[-_LOG_CHARACTERS:]


def _failed(name: str, error: str) -> Record:
    return {"case": name, "state": "failed", "seconds": 0.0, "figures": {}, "error": error, "line": None}


def kill_group(leader: "subprocess.Popen[bytes]") -> bool:
    """Kill the process group of ``leader``; whether ``leader`` is gone."""
    ends_s = time.monotonic() + _DEATH_S
    while time.monotonic() < ends_s:
        leader.poll()
        try:
            os.killpg(leader.pid, signal.SIGKILL)
        except ProcessLookupError:
            break
        time.sleep(_POLL_S / 5)
    return leader.poll() is not None
