"""The page about static batches agrees with the code."""

import re
from pathlib import Path

import pytest

from experiments.padded.interval import AdaptiveInterval, FixedInterval, WhenIdle
from experiments.padded.offload import OFFLOADERS
from experiments.padded.presets import STATIC_PRESETS, static_preset
from shoal.batches import FORMERS

PAGE = (Path(__file__).parents[2] / "docs" / "static-batches.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_former_is_described() -> None:
    assert [row[0] for row in rows("Batch formers")] == list(FORMERS)


def test_every_option_is_described() -> None:
    options = {row[0]: row[2] for row in rows("What is chosen")}
    assert options.keys() == set(static_preset("scls").__dataclass_fields__)
    assert set(re.findall(r"`([a-z-]+)`", f"`{options['offloader']}`")) == set(OFFLOADERS)


def test_every_preset_is_described() -> None:
    assert [row[0] for row in rows("Presets")] == list(STATIC_PRESETS)


@pytest.mark.parametrize("row", rows("Presets"), ids=lambda row: row[0])
def test_a_preset_is_what_its_row_says(row: list[str]) -> None:
    name, former, offloader, interval, slices, largest = row
    options = static_preset(name)
    intervals = {"when idle": WhenIdle(), "fixed": FixedInterval(6.0), "adaptive": AdaptiveInterval(6.0)}
    assert options.former is FORMERS[former]
    assert options.offloader is OFFLOADERS[offloader]
    assert options.interval == intervals[interval]
    assert options.slice_tokens == (128 if slices == "yes" else None)
    assert options.trust_predictions == (slices == "by prediction")
    assert options.max_batch == (16 if largest == "fixed" else None)
