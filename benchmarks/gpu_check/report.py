"""What `benchmarks/gpu_check` prints and writes."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.run import Done

_WIDTH = 200
_ERROR_WIDTH = 90


def line_of(done: Done) -> str:
    """One line of what came of a part."""
    head = f"{done.part.name:<8} {done.state:<8} {done.seconds:6.1f} s  "
    return head + _said(done)[: _WIDTH - len(head)]


def _said(done: Done) -> str:
    said = [done.reason] if done.reason is not None else []
    if done.cases:
        said.append(f"{sum(case['state'] == 'ok' for case in done.cases)} of {len(done.cases)} cases ok")
    for state in ("failed", "cut"):
        bad = [case for case in done.cases if case["state"] == state]
        if bad:
            first = f"{bad[0]['case']}: {bad[0]['error'] or ''}"[:_ERROR_WIDTH]
            said.append(f"{len(bad)} {state}, {first}")
    said += [case["line"] for case in done.cases if case["line"]]
    return "; ".join(said).replace("\n", " ")


def written(value: float | str) -> str:
    """A figure with about three digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def tables(about: Mapping[str, str], parts: Sequence[Done]) -> str:
    """Markdown: what was measured, where, and what was not."""
    text = [", ".join(f"{name} {value}" for name, value in about.items()) + "."]
    for done in parts:
        if done.cases:
            text.append(_table(done))
    bad = [f"{done.part.name} ({done.reason or done.state})" for done in parts if done.state != "ok"]
    text.append(f"Not all of it was measured: {', '.join(bad)}." if bad else "Nothing was left out.")
    return "\n\n".join(text)


def _table(done: Done) -> str:
    columns = list(dict.fromkeys(name for case in done.cases for name in case["figures"]))
    bad = any(case["state"] != "ok" for case in done.cases)
    names = [done.part.name, *columns, *(["not ok"] if bad else [])]
    rows = [names, ["---"] * len(names)]
    for case in done.cases:
        row = [case["case"], *(written(case["figures"].get(name, "")) for name in columns)]
        if bad:
            row.append("" if case["state"] == "ok" else f"{case['state']}: {case['error'] or ''}")
        rows.append(row)
    title = f"{done.part.does[0].upper()}{done.part.does[1:]}:"
    return title + "\n\n" + "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_json(path: Path, about: Mapping[str, str], parts: Sequence[Done]) -> None:
    """Write all of it; a reader sees either this or what was there before."""
    content: dict[str, Any] = {"about": about, "parts": [_plain(done) for done in parts]}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def _plain(done: Done) -> Mapping[str, Any]:
    return {
        "name": done.part.name,
        "state": done.state,
        "seconds": round(done.seconds, 1),
        "reason": done.reason,
        "cases": done.cases,
        "log": done.log,
    }
