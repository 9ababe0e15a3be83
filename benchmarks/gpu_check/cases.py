"""Cases of a part of `benchmarks.gpu_check`: run in the part's process, each recorded as soon as it ends.

A part is a module with ``run(cases)``. Records go to a file, one JSON object per line, which the parent
process reads, so that a kill loses none.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

Figures = Mapping[str, float | str]
"""Measurements of a case; names include the unit."""

BROKEN = 3
"""Exit status after an error that leaves the device unusable for this process."""
NO_DEVICE = 4
"""Exit status if the device does not exist."""
_LONGEST_ERROR = 300


class SkipCase(Exception):
    """Raised by a case that does not apply to this machine."""


class Cases:
    """The cases of one part.

    records: the file. tiny: use tiny shapes, for a dry run. ends_s: deadline of the part, by
    ``time.monotonic``. begun: cases that an earlier process of this part began.
    """

    def __init__(
        self, records: Path, device: str, *, tiny: bool, ends_s: float, begun: Collection[str] = ()
    ) -> None:
        self.device = device
        self.tiny = tiny
        self._records = records
        self._ends_s = ends_s
        self._begun = frozenset(begun)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._ends_s - time.monotonic()

    def run(
        self,
        name: str,
        measure: Callable[[], Figures | None],
        *,
        seconds: float = 1.0,
        line: str | None = None,
    ) -> None:
        """Measure a case and record the result; an error fails this case alone.

        seconds: the case is cut if fewer are left. line: for the part's line, formatted with the figures.
        """
        if name in self._begun:
            return
        if self.left_s < seconds:
            self.report(name, "cut", error="no time was left")
            return
        self._write({"begin": name})
        started = time.monotonic()
        try:
            figures = dict(measure() or {})
        except SkipCase as reason:
            self.report(name, "left out", error=str(reason))
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
            self.report(name, "failed", error=message, seconds=time.monotonic() - started)
        else:
            shown = None if line is None else line.format_map(figures)
            self.report(name, "ok", figures, line=shown, seconds=time.monotonic() - started)
            return
        self._recover_device()

    def report(
        self,
        name: str,
        state: str,
        figures: Figures | None = None,
        *,
        error: str | None = None,
        line: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Record a case. state: ok, failed, cut (no time) or left out (does not apply to this machine)."""
        record: dict[str, Any] = {"case": name, "state": state, "seconds": round(seconds, 3)}
        record |= {"figures": dict(figures or {}), "error": error, "line": line}
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _recover_device(self) -> None:
        """Free memory after an error; ends this process if the device is unusable."""
        if "cuda" not in self.device:
            return
        import torch

        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(BROKEN)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that ``share`` of the values do not exceed; NaN without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
