"""A measured run and its simulation: figures by hand, the table, the picture, the file."""

import json
from pathlib import Path

import pytest
from measure_builders import make_row

from shoal.measure import Comparison, compare_with_measured


def run(factor: float, names: str = "abcd") -> list:
    """Requests whose times grow with ``factor``; the last has one token only."""
    return [
        make_row(name, first=(1 + at) * factor, end=(1 + at + 4 * at) * factor, output=5 if at < 3 else 1)
        for at, name in enumerate(names)
    ]


def compared(**more: list) -> Comparison:
    runs = {"simulated": run(1.2), "faster": run(1.2 * 0.98), "slower": run(1.2 * 1.03), **more}
    return compare_with_measured(run(1.0), runs["simulated"], runs["faster"], runs["slower"])


def test_figures_are_those_of_both_runs() -> None:
    rows = {(row.time, row.figure): row for row in compared().rows}
    assert {time for time, _ in rows} == {"TTFT", "TPOT", "E2E"}
    assert {figure for _, figure in rows} == {"mean", "p50", "p99"}
    assert (rows["TTFT", "mean"].measured_s, rows["TTFT", "mean"].simulated_s) == pytest.approx((2.5, 3.0))
    assert rows["TPOT", "mean"].measured_s == pytest.approx(1.0)  # of 0, 1 and 2; one token has none
    assert rows["E2E", "p50"].measured_s == pytest.approx((6 + 11) / 2)
    for row in rows.values():
        assert row.difference == pytest.approx(0.2)
        assert row.band == pytest.approx((-0.02, 0.03))


def test_only_requests_of_both_runs_count() -> None:
    found = compared(simulated=run(1.2, "cbx")[:2])
    assert [record.request_id for record in found.measured] == ["b", "c"]
    assert [record.request_id for record in found.simulated] == ["b", "c"]
    assert found.left_out == 2


def test_without_requests_there_are_no_figures() -> None:
    found = compare_with_measured([], [], [], [])
    assert (found.rows, found.panels()) == ([], [])


def test_the_table_has_units() -> None:
    [first, *_] = compared().grid().rows
    assert first == ["TTFT", "mean", "2.50 s", "3.00 s", "+20.0%", "-2.0% +3.0%"]


def test_the_picture_has_both_distributions(tmp_path: Path) -> None:
    found = compared()
    assert [panel.title for panel in found.panels()] == [
        "Time to first token",
        "Time per output token",
        "End-to-end latency",
    ]
    for panel in found.panels():
        assert [series.label for series in panel.series] == ["measured", "simulated"]
        measured, simulated = panel.series
        assert [value * 1.2 for value in measured.x] == pytest.approx(simulated.x)
        assert measured.y[-1] == simulated.y[-1] == 1
    found.draw(tmp_path / "both.svg", "title")
    assert "<svg" in (tmp_path / "both.svg").read_text()


def test_the_file_has_every_figure(tmp_path: Path) -> None:
    compared().write(tmp_path / "comparison.json")
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert (written["requests"], written["left_out"], len(written["figures"])) == (4, 0, 9)
    assert written["figures"][0]["difference"] == pytest.approx(0.2)
