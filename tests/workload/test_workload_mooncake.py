"""Written traces are read back."""

import tempfile
from pathlib import Path

import pytest
import workload_builders as build
from hypothesis import given
from hypothesis import strategies as st

from shoal.core import ConfigError
from shoal.workload import (
    LENGTHS,
    Poisson,
    TraceRow,
    block_hashes,
    generate_rows,
    load_trace,
    sort_by_arrival,
    write_mooncake,
)


@st.composite
def trace_rows(draw: st.DrawFn) -> TraceRow:
    prompt = draw(st.integers(1, 5000))
    hashes = draw(st.lists(st.integers(0, 2**63), max_size=-(-prompt // 512)))
    client = draw(st.none() | st.text(max_size=5))
    arrival = draw(st.integers(0, 2**50) | st.integers(0, 10**6).map(lambda ms: ms * 10**6))
    name, service = draw(st.none() | st.text(max_size=5)), draw(st.none() | st.text(max_size=5))
    output = draw(st.integers(1, 10**6))
    return TraceRow(arrival, prompt, output, client, tuple(hashes), request_id=name, service=service)


@given(st.lists(trace_rows(), max_size=6))
def test_round_trip(rows: list[TraceRow]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        write_mooncake(path, rows)
        again = load_trace(path, "mooncake", from_zero=False).rows
    assert again == sort_by_arrival(rows, from_zero=False)


def test_generated_workload_survives_to_the_nanosecond(tmp_path: Path) -> None:
    rows = generate_rows(LENGTHS["sharegpt"], Poisson(3.0), 200, seed=4)
    write_mooncake(tmp_path / "out", rows)
    assert load_trace(tmp_path / "out", from_zero=False).rows == rows


def test_whole_milliseconds_stay_integers(tmp_path: Path) -> None:
    path = tmp_path / "out"
    write_mooncake(path, [build.row(arrival=7_000_000, prompt=600, hashes=(3,))])
    assert path.read_text() == '{"timestamp": 7, "input_length": 600, "output_length": 10, "hash_ids": [3]}\n'


def test_finer_hashes_become_full_blocks_of_512(tmp_path: Path) -> None:
    first = TraceRow(0, 1100, 5, None, tuple(range(68)), 16)
    second = TraceRow(1, 1100, 5, None, (*range(40), *range(100, 128)), 16)
    write_mooncake(tmp_path / "out", [first, second])
    left, right = load_trace(tmp_path / "out").rows
    assert (len(left.hashes), len(right.hashes)) == (2, 2)
    assert left.hashes[0] == right.hashes[0]
    assert left.hashes[1] != right.hashes[1]
    shared = [
        mine == yours for mine, yours in zip(block_hashes(left, 16), block_hashes(right, 16), strict=True)
    ]
    assert shared == [True] * 32 + [False] * 32


def test_rows_without_lengths_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 1 has no lengths"):
        write_mooncake(tmp_path / "out", [build.row(), TraceRow(0, 0, 0)])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (
            '{"timestamp": -1, "input_length": 600, "output_length": 5}',
            "timestamp is '-1'; expected a number from 0",
        ),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, "1"]}',
            "hash_ids has something else than numbers",
        ),
        (
            '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, null]}',
            "hash_ids has something else than numbers",
        ),
    ],
)
def test_broken_lines_are_named(line: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f":1: {problem}"):
        load_trace(build.write(tmp_path, line), "mooncake")


def test_missing_hashes_are_noted(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": %d, "output_length": 5, "hash_ids": [0]}\n'
    assert load_trace(build.write(tmp_path, line % 1023)).note == ""
    trace = load_trace(build.write(tmp_path, line % 1024 + line % 600))
    assert trace.note == "prompts whose end has no hashes, and is taken to share nothing: 1"
