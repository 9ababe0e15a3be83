"""What a part of `benchmarks/gpu_check` does in its process: cases, each told as soon as it is known.

A part is a module with ``run(cases)``. What it tells goes to a file, one JSON object a line, which is read
by the process that started it: so nothing is lost when this one is killed.
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
"""What a case measured, by name with the unit."""

BROKEN = 3
"""Exit status of a process whose device does not go on after an error; another process may."""
NO_DEVICE = 4
"""Exit status where there is no such device."""
_LONGEST_ERROR = 300


class LeftOut(Exception):
    """Raised by a case that is not for this machine; says why."""


class Cases:
    """The cases of one part.

    records: the file. device: where to compute. tiny: shapes are to be tiny, for a dry run. ends_s: when the
    part has to be done, by ``time.monotonic``. begun: cases that an earlier process of this part began.
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
        """Seconds until the part has to be done."""
        return self._ends_s - time.monotonic()

    def run(
        self,
        name: str,
        measure: Callable[[], Figures | None],
        *,
        seconds: float = 1.0,
        line: str | None = None,
    ) -> None:
        """Measure a case, and tell what came of it; an error ends the case alone.

        seconds: it is left out where fewer are left. line: what the part's line says of it, formatted with
        the figures.
        """
        if name in self._begun:
            return
        if self.left_s < seconds:
            self.tell(name, "cut", error="no time was left")
            return
        self._write({"begin": name})
        started = time.monotonic()
        try:
            figures = dict(measure() or {})
        except LeftOut as reason:
            self.tell(name, "left out", error=str(reason))
        except Exception as error:
            traceback.print_exc()
            message = f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
            self.tell(name, "failed", error=message, seconds=time.monotonic() - started)
        else:
            said = None if line is None else line.format_map(figures)
            self.tell(name, "ok", figures, line=said, seconds=time.monotonic() - started)
            return
        self._go_on()

    def tell(
        self,
        name: str,
        state: str,
        figures: Figures | None = None,
        *,
        error: str | None = None,
        line: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Tell of a case. state: ok, failed, cut (no time for it) or left out (not for this machine)."""
        record: dict[str, Any] = {"case": name, "state": state, "seconds": round(seconds, 3)}
        record |= {"figures": dict(figures or {}), "error": error, "line": line}
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _go_on(self) -> None:
        """After an error, give its memory back; ends this process where the device is of no more use."""
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
    """The least value that so large a share of them does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
