"""Output of `benchmarks.gpu_check`: a line per part, Markdown tables and the JSON file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.run import PartResult

_WIDTH = 200
_ERROR_WIDTH = 90


def line_of(result: PartResult) -> str:
    """One line of a part's result."""
    head = f"{result.part.name:<8} {result.state:<8} {result.seconds:6.1f} s  "
    return head + _summary(result)[: _WIDTH - len(head)]


def _summary(result: PartResult) -> str:
    texts = [result.reason] if result.reason is not None else []
    if result.cases:
        texts.append(f"{sum(case['state'] == 'ok' for case in result.cases)} of {len(result.cases)} cases ok")
    for state in ("failed", "cut"):
        bad = [case for case in result.cases if case["state"] == state]
        if bad:
            first = f"{bad[0]['case']}: {bad[0]['error'] or ''}"[:_ERROR_WIDTH]
            texts.append(f"{len(bad)} {state}, {first}")
    texts += [case["line"] for case in result.cases if case["line"]]
    return "; ".join(texts).replace("\n", " ")


def format_figure(value: float | str) -> str:
    """About three significant digits."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def tables(about: Mapping[str, str], parts: Sequence[PartResult]) -> str:
    """Markdown tables of all parts, and the parts that are not ok."""
    text = [", ".join(f"{name} {value}" for name, value in about.items()) + "."]
    for result in parts:
        if result.cases:
            text.append(_table(result))
    bad = [
        f"{result.part.name} ({result.reason or result.state})" for result in parts if result.state != "ok"
    ]
    text.append(f"Not all of it was measured: {', '.join(bad)}." if bad else "Nothing was left out.")
    return "\n\n".join(text)


def _table(result: PartResult) -> str:
    columns = list(dict.fromkeys(name for case in result.cases for name in case["figures"]))
    bad = any(case["state"] != "ok" for case in result.cases)
    names = [result.part.name, *columns, *(["not ok"] if bad else [])]
    rows = [names, ["---"] * len(names)]
    for case in result.cases:
        row = [case["case"], *(format_figure(case["figures"].get(name, "")) for name in columns)]
        if bad:
            row.append("" if case["state"] == "ok" else f"{case['state']}: {case['error'] or ''}")
        rows.append(row)
    title = f"{result.part.description[0].upper()}{result.part.description[1:]}:"
    return title + "\n\n" + "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def write_json(path: Path, about: Mapping[str, str], parts: Sequence[PartResult]) -> None:
    """Write the file atomically."""
    content: dict[str, Any] = {"about": about, "parts": [_plain(result) for result in parts]}
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)


def _plain(result: PartResult) -> Mapping[str, Any]:
    return {
        "name": result.part.name,
        "state": result.state,
        "seconds": round(result.seconds, 1),
        "reason": result.reason,
        "cases": result.cases,
        "log": result.log,
    }
