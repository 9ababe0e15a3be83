"""Requests drawn from ServeGen's clients follow their rates, shapes and lengths."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from shoal.core import ConfigError
from shoal.workload import TraceRow, guess_format, load_trace

NS = 10**9


def make_client(folder: Path, number: int, trace: str, windows: dict[str, tuple[str, str]]) -> None:
    (folder / f"chunk-{number}-trace.csv").write_text(trace)
    data = {
        key: {"input_tokens": prompts, "output_tokens": outputs}
        for key, (prompts, outputs) in windows.items()
    }
    (folder / f"chunk-{number}-dataset.json").write_text(json.dumps(data))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_client(
        tmp_path,
        3,
        "0,0.5,0.9,Gamma,1.2,1.7\n600,0,0,,0,0\n1200,10.0,3.0,Gamma,0.1111111111,0.9\n",
        {"0": ("{5: 0.25, 6: 0.75}", "{9: 1.0}"), "1200": ("{50.0: 1.0}", "{90: 0.5, 91: 0.5}")},
    )
    make_client(
        tmp_path, 10, "0,0.0016666667,0,,0,0\n600,2.0,0.5,Weibull,2.1,0.56\n", {"0": ("{7: 1}", "{8: 1}")}
    )
    return tmp_path


def rows_of(folder: Path, seed: int = 0) -> list[TraceRow]:
    return load_trace(folder, seed=seed, from_zero=False).rows


def test_every_window_has_the_requests_of_its_rate(folder: Path) -> None:
    assert guess_format(folder) == "servegen"
    counts = Counter((row.client, row.arrival_ns // (600 * NS)) for row in rows_of(folder))
    assert counts == {
        ("chunk-3", 0): 300,
        ("chunk-3", 2): 6000,
        ("chunk-10", 0): 1,
        ("chunk-10", 1): 1200,
    }


def test_rows_are_in_order_and_depend_on_the_seed_alone(folder: Path) -> None:
    rows = rows_of(folder, 5)
    assert rows == sorted(rows, key=lambda row: row.arrival_ns)
    assert rows == rows_of(folder, 5) != rows_of(folder, 6)
    assert load_trace(folder, seed=5, limit=10, from_zero=False).rows == rows[:10]


def test_lengths_are_of_the_window(folder: Path) -> None:
    rows = [row for row in rows_of(folder) if row.client == "chunk-3"]
    early = Counter(row.prompt_tokens for row in rows if row.arrival_ns < 600 * NS)
    late = Counter((row.prompt_tokens, row.output_tokens) for row in rows if row.arrival_ns >= 1200 * NS)
    assert set(early) == {5, 6}
    assert abs(early[6] / 300 - 0.75) < 0.08
    assert set(late) == {(50, 90), (50, 91)}


@pytest.mark.parametrize(("client", "start", "cv"), [("chunk-3", 1200, 3.0), ("chunk-10", 600, 0.5)])
def test_times_between_requests_have_the_shape_of_the_window(
    folder: Path, client: str, start: int, cv: float
) -> None:
    times = [
        row.arrival_ns for row in rows_of(folder) if row.client == client and row.arrival_ns >= start * NS
    ]
    gaps = np.diff(times)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1)


@pytest.mark.parametrize(
    ("trace", "lengths", "problem"),
    [
        ("0,1,1,Gamma,1,1\n600,1\n", "{5: 1}", "chunk-3-trace.csv:2: 2 columns"),
        ("0,1,1,Pareto,1,1\n", "{5: 1}", "chunk-3-trace.csv:1: pattern is 'Pareto'"),
        ("0,x,1,Gamma,1,1\n", "{5: 1}", "chunk-3-trace.csv:1: rate is 'x'"),
        ("0,1,1,Gamma,0,1\n", "{5: 1}", "chunk-3-trace.csv:1: p1 is '0'"),
        ("0,1,1,Gamma,1,1\n", "{}", "chunk-3-dataset.json:1: window 0 has requests but no distribution"),
        ("0,1,1,Gamma,1,1\n", "{0: 1}", "no distribution 'input_tokens'"),
        ("0,1,1,Gamma,1,1\n", "five", "no distribution 'input_tokens'"),
    ],
)
def test_broken_clients_are_named(trace: str, lengths: str, problem: str, tmp_path: Path) -> None:
    make_client(tmp_path, 3, trace, {"0": (lengths, "{1: 1}")})
    with pytest.raises(ConfigError) as caught:
        load_trace(tmp_path)
    assert problem in str(caught.value)


def test_missing_dataset_is_named(folder: Path) -> None:
    (folder / "chunk-3-dataset.json").unlink()
    with pytest.raises(ConfigError, match=r"chunk-3-dataset\.json: cannot be read"):
        load_trace(folder)


def test_idle_clients_need_no_lengths(tmp_path: Path) -> None:
    make_client(tmp_path, 0, "0,0,0,,0,0\n600,0,0,,0,0\n", {})
    assert load_trace(tmp_path).rows == []


def test_multimodal_prompts_are_text_and_images(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-trace.csv").write_text("0,1.0,1.0,Gamma,1,1\n")
    window = {
        "text_tokens": "{0: 0.5, 10: 0.5}",
        "image_tokens": "{0: 0.5, 1000: 0.5}",
        "output_tokens": "{7: 1}",
    }
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": window}))
    counts = Counter(row.prompt_tokens for row in rows_of(tmp_path))
    assert set(counts) == {1, 10, 1000, 1010}
    assert all(count == pytest.approx(150, abs=50) for count in counts.values())
    del window["image_tokens"]
    (tmp_path / "chunk-0-dataset.json").write_text(json.dumps({"0": window}))
    assert {row.prompt_tokens for row in rows_of(tmp_path)} == {1, 10}
