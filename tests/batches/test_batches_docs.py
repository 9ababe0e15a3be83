"""The page about batches agrees with the code."""

from pathlib import Path

import pytest

from shoal.batches import FORMERS
from shoal.cluster.batching_options import BatchingOptions
from shoal.config import PRESETS
from shoal.config.batch_presets import BATCH_PRESETS

PAGE = (Path(__file__).parents[2] / "docs" / "batches.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table under a heading, without its head."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = section[section.index("\n|") :].split("\n\n")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_every_former_is_described() -> None:
    assert [row[0] for row in rows("Batch formers")] == list(FORMERS)


def test_every_option_is_described() -> None:
    names = {"interval_s": "interval", "slice_tokens": "slice"}
    fields = BatchingOptions.__dataclass_fields__
    assert [row[0] for row in rows("How it works")] == [names.get(name, name) for name in fields]


def test_every_preset_is_described() -> None:
    assert [row[0] for row in rows("Presets")] == list(BATCH_PRESETS)


@pytest.mark.parametrize("row", rows("Presets"), ids=lambda row: row[0])
def test_a_preset_is_what_its_row_says(row: list[str]) -> None:
    name, former, dispatch, interval, slices, largest = row
    preset = PRESETS[name]
    options = preset.batching
    assert options is not None
    assert options.former == former
    longest = "`, longest first" if options.longest_first else ""
    assert f"{preset.dispatch}{longest}" == dispatch
    assert options.interval_s == (None if interval == "when idle" else 3.0)
    assert (options.load_factor == 0.5) == ("half the least load" in interval)
    assert options.slice_tokens == (128 if slices == "128" else None)
    assert options.trust_predictions == (slices == "by prediction")
    assert options.max_batch == (16 if largest == "16" else None)
    assert options.lengths == ("learned" if slices == "by prediction" else "history")
