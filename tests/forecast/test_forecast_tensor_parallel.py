"""Collectives of tensor parallelism: equal in roofline and layer tables; known links."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from layer_tables import MODEL, write_profile
from shoal.forecast.device_specs import DEVICE_SPECS, device_spec
from shoal.forecast.model_spec import model_spec
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.roofline import RooflineTimes
from shoal.forecast.roofline_ops import Link
from shoal.forecast.step_times import StepRows

PAGE = (Path(__file__).parents[2] / "docs" / "latency-models.md").read_text(encoding="utf-8")
ROWS = [StepRows(3, 200, (), 3), StepRows(2, 128, ((40, 16), (9, 0)), 3), StepRows(0, 0, ((30, 0),), 0)]
FAST, SLOW = Link(1e18, 0.0), Link(2e9, 7e-6)


def exchanged(rows: StepRows) -> float:
    """2 x layers + 1 sums of hidden states over two devices, and the logits of rows that sample."""
    hidden = 7e-6 + 2 * rows.new_tokens * MODEL.hidden / 2e9
    logits = 7e-6 + rows.sampled * MODEL.vocab / 2e9 if rows.sampled else 0.0
    return (2 * MODEL.layers + 1) * hidden + logits


@pytest.mark.parametrize("rows", ROWS)
def test_tables_and_roofline_count_the_same(tmp_path: Path, rows: StepRows) -> None:
    write_profile(tmp_path / "tp2")
    device = device_spec("h100")
    tables = [ProfileTimes.load(tmp_path, 2, model=MODEL, link=link) for link in (FAST, SLOW)]
    rooflines = [RooflineTimes(MODEL, device, 2, link=link) for link in (FAST, SLOW)]
    embedding = 7e-6 + 2 * rows.new_tokens * MODEL.hidden / 2e9
    for (fast, slow), left_out in ((tables, 0.0), (rooflines, embedding)):
        added = slow.step_time(rows) - fast.step_time(rows)
        assert added == pytest.approx(exchanged(rows) - left_out, rel=1e-6)


def test_without_a_link_it_is_the_device_s(tmp_path: Path) -> None:
    write_profile(tmp_path / "tp2")
    (tmp_path / "meta.yaml").write_text("model: tiny\nhardware: none\ngpu: NVIDIA GeForce RTX 4090\n")
    named, link = device_spec("l40s"), device_spec("rtx-4090").link
    [rows, *_] = ROWS
    found = ProfileTimes.load(tmp_path, 2, model=MODEL)
    assert found.step_time(rows) == ProfileTimes.load(tmp_path, 2, model=MODEL, link=link).step_time(rows)
    fast = replace(named, link=FAST)
    other = ProfileTimes.load(tmp_path, 2, model=MODEL, device=fast)
    assert other.step_time(rows) == ProfileTimes.load(tmp_path, 2, model=MODEL, link=FAST).step_time(rows)
    assert RooflineTimes(MODEL, fast, 2).step_time(rows) < RooflineTimes(MODEL, named, 2).step_time(rows)


def test_a_measured_step_over_pcie_5() -> None:
    """2,048 prompt tokens of 64 layers of 5,120: 128 reductions of 21 MB at 16 GB/s, 20 us each."""
    model, device = model_spec("qwen3-32b"), device_spec("rtx-pro-6000")
    rows = StepRows(0, 0, ((2048, 0),), 0)
    without = RooflineTimes(model, device, 2, link=FAST).step_time(rows)
    assert RooflineTimes(model, device, 2).step_time(rows) - without == pytest.approx(0.1704, abs=0.0005)


def test_the_page_has_exactly_the_links_on_record() -> None:
    table = re.findall(r"^\| ([a-z0-9-]+) \| ([\d.]+) \| ([\d.]+) \| \S.* \|$", PAGE, re.MULTILINE)
    found = {name: (float(rate) * 1e9, float(latency) / 1e6) for name, rate, latency in table}
    links = {name: (spec.link.bandwidth, spec.link.start_s) for name, spec in DEVICE_SPECS.items()}
    assert found == {name: pytest.approx(link) for name, link in links.items()}
