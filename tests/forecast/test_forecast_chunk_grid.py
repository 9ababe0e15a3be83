"""Attention measured by one chunk and its context: read by key, with holes, and for several chunks."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_tables import CHUNKS, CONTEXTS, DECODES, LENGTHS, MODEL, attention, write_profile
from shoal.forecast.profile_files.attention import ChunkPoint, PrefillKeyTable, by_prefill_key
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.step_times import StepRows

TWOS = ((0, *CHUNKS), CONTEXTS, DECODES, LENGTHS)
ONE_AND_A_HALF = ((0, 24, 36), (0, 24, 54), (1, 3), (16, 24, 81, 182))
"""Axes of two grids that share little but their beginnings."""


def grid(chunks: tuple[int, ...], contexts: tuple[int, ...], *decodes: tuple[int, ...]) -> list[ChunkPoint]:
    points: list[ChunkPoint] = [(0, 0, n, k) for n, k in product(*decodes)]
    for chunk, before in product([chunk for chunk in chunks if chunk], contexts):
        points += [(chunk, before, 0, 0), *((chunk, before, n, k) for n, k in product(*decodes))]
    return points


def table(points: list[ChunkPoint]) -> PrefillKeyTable:
    return PrefillKeyTable(by_prefill_key({p: attention(*p) for p in points}), Path("attention.csv"))


WHOLE = table(grid(*TWOS))
UNION = table(grid(*TWOS) + grid(*ONE_AND_A_HALF))


@pytest.mark.parametrize("found", [WHOLE, UNION])
@given(
    chunk=st.integers(36, 64),
    before=st.integers(32, 60),
    decodes=st.integers(1, 4),
    length=st.floats(24, 182),
)
def test_a_chunk_is_interpolated_exactly_also_where_the_grid_has_holes(
    found: PrefillKeyTable, chunk: int, before: int, decodes: int, length: float
) -> None:
    expected = attention(chunk, before, decodes, length)  # type: ignore[arg-type]
    assert found.chunks([(chunk, before)], decodes, length) == pytest.approx(expected)
    assert found.chunks([(chunk, before)], 0, 0.0) == pytest.approx(attention(chunk, before, 0, 0))
    assert found.decode_line(decodes).at(length) == pytest.approx(0.02 * decodes * length + 5)


@pytest.mark.parametrize(("chunk", "count"), [(16, 2), (16, 4), (32, 2)])
@pytest.mark.parametrize("found", [WHOLE, UNION])
def test_chunks_without_context_add_what_each_takes_beyond_a_kernel_start(
    found: PrefillKeyTable, chunk: int, count: int
) -> None:
    others = (count - 1) * (attention(chunk, 0, 0, 0) - attention(16, 0, 0, 0))
    chunks = [(chunk, 0)] * count
    assert found.chunks(chunks, 0, 0.0) == pytest.approx(attention(chunk, 0, 0, 0) + others)
    assert found.chunks(chunks, 2, 64.0) == pytest.approx(attention(chunk, 0, 2, 64) + others)


def test_every_measured_point_is_a_point_by_key() -> None:
    measured = {point: attention(*point) for point in grid(*TWOS)}
    by_key = by_prefill_key(measured)
    for (chunk, before, decodes, context), micros in measured.items():
        assert by_key[chunk, before + chunk / 2 if chunk else 0.0, decodes, context] == micros
    pairs = sum(after > before for before, after in product(CHUNKS, CHUNKS))
    assert len(by_key) == len(measured) + pairs * (1 + len(DECODES) * len(LENGTHS))


def test_a_folder_of_two_grids_is_read(tmp_path: Path) -> None:
    path = write_profile(tmp_path) / "attention.csv"
    whole = ProfileTimes.load(tmp_path, model=MODEL)
    points = [",".join(map(str, (*point, attention(*point)))) for point in grid(*ONE_AND_A_HALF)]
    path.write_text("\n".join([path.read_text(), *points]))
    both = ProfileTimes.load(tmp_path, model=MODEL)
    rows = StepRows(2, 128, ((40, 50),), 3)
    assert both.step_time(rows) == pytest.approx(whole.step_time(rows))
