"""Attention measured by prompt tokens and their key: values of the table at, between and beyond points."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layer_tables import (
    DECODES,
    KEY_CHUNKS,
    LENGTHS,
    MODEL,
    NO_DECODES,
    attention_by_key,
    key_points,
    write_key_profile,
)
from shoal.core import ConfigError
from shoal.forecast.model_spec import find_model_spec
from shoal.forecast.profile_files.attention import PrefillKeyTable, PrefillPoint, prefill_key
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.step_times import StepRows

SOURCE = Path("attention.csv")
MEASURED: dict[PrefillPoint, float] = {point: attention_by_key(*point) for point in key_points()}
TABLE = PrefillKeyTable(MEASURED, SOURCE)


def at(table: PrefillKeyTable, tokens: int, key: float, decodes: int, length: float) -> float:
    """What ``table`` says of one chunk of that key; contexts need not be whole."""
    if not tokens:
        return table.decode_line(decodes).at(length)
    return table.chunks([(tokens, key - tokens / 2)], decodes, length)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("chunks", "key"),
    [([(100, 0)], 50), ([(100, 30)], 80), ([(50, 0), (50, 0)], 25), ([(30, 10), (10, 100)], 45)],
)
def test_key_is_the_mean_over_tokens(chunks: list[tuple[int, int]], key: float) -> None:
    assert prefill_key(chunks) == key


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=5))
def test_key_is_half_a_token_short_of_positions_attended(chunks: list[tuple[int, int]]) -> None:
    attended = [before + place + 1 for count, before in chunks for place in range(count)]
    assert prefill_key(chunks) == pytest.approx(sum(attended) / len(attended) - 0.5)


@pytest.mark.parametrize("point", key_points())
def test_measured_points_are_exact(point: PrefillPoint) -> None:
    assert at(TABLE, *point) == pytest.approx(MEASURED[point], rel=1e-12)


@given(st.integers(16, 64), st.floats(24, 300), st.integers(0, 20), st.floats(16, 1000))
def test_between_points_and_past_keys_and_decodes_times_are_linear(
    tokens: int, key: float, decodes: int, length: float
) -> None:
    assert at(TABLE, tokens, key, decodes, length) == pytest.approx(
        attention_by_key(tokens, key, decodes, length)
    )


@given(st.integers(1, 30), st.floats(16, 2000))
def test_decodes_alone_are_linear(decodes: int, length: float) -> None:
    assert at(TABLE, 0, 0, decodes, length) == pytest.approx(attention_by_key(0, 0, decodes, length))


def test_prompts_alone_are_apart_from_one_decode() -> None:
    alone, beside = (at(TABLE, 50, 30.0, decodes, 16.0) for decodes in (0, 1))
    assert beside - alone == pytest.approx(NO_DECODES + 0.02 * 16)


def test_before_the_first_point_its_time_stands() -> None:
    assert at(TABLE, 16, 8.0, 2, 64.0) == MEASURED[16, 16.0, 2, 64]
    assert at(TABLE, 16, 24.0, 2, 1.0) == MEASURED[16, 24.0, 2, 16]
    assert TABLE.chunks([(3, 22)], 1, 16.0) == at(TABLE, 16, 23.5, 1, 16.0)


@given(st.integers(64, 3000), st.floats(81, 9000), st.integers(4, 500), st.floats(256, 9000))
def test_noise_at_the_end_never_lets_times_fall(tokens: int, key: float, decodes: int, length: float) -> None:
    noisy = PrefillKeyTable({point: 50.0 - sum(point) / 100 for point in MEASURED}, SOURCE)
    longest = at(noisy, 64, 81.0, 4, 256.0)
    assert at(noisy, tokens, key, decodes, length) == pytest.approx(longest)
    assert at(noisy, 0, 0, max(decodes, 8), length) == pytest.approx(at(noisy, 0, 0, 8, 256))


def test_several_chunks_are_looked_up_together() -> None:
    chunks = [(20, 10), (30, 40)]
    expected = attention_by_key(50, (20 * 20 + 30 * 55) / 50, 2, 100)
    assert TABLE.chunks(chunks, 2, 100.0) == pytest.approx(expected)


@pytest.mark.parametrize("hole", [(16, 24.0, 2, 64), (41, 23.5, 4, 16), (64, 81.0, 1, 256), (0, 0.0, 2, 64)])
def test_holes_in_linear_times_are_filled_exactly(hole: PrefillPoint) -> None:
    rest = PrefillKeyTable({point: micros for point, micros in MEASURED.items() if point != hole}, SOURCE)
    assert at(rest, *hole) == pytest.approx(MEASURED[hole])


@pytest.mark.parametrize(
    ("key", "filled"),
    [
        (24.0, 64.0),  # Along the key, from 64 to 64: the kernel waits for the decodes.
        (90.0, 90.0 + 10.0 * (64 - 16) / (100 - 16)),  # Along their context, from 90 to 100.
    ],
)
def test_a_hole_is_filled_along_the_axis_that_changes_less(key: float, filled: float) -> None:
    keys, lengths = (16.0, 24.0, 36.0, 90.0, 200.0), (16, 64, 100)
    waiting = {(64, k, 1, length): max(k, float(length)) for k in keys for length in lengths}
    del waiting[64, key, 1, 64]
    table = PrefillKeyTable({(0, 0.0, 1, 16): 1.0, (64, 16.0, 0, 0): 1.0, **waiting}, SOURCE)
    assert at(table, 64, key, 1, 64.0) == pytest.approx(filled)


def test_rows_too_large_for_memory_may_be_missing() -> None:
    fits = {
        point: micros
        for point, micros in MEASURED.items()
        if point[2] * point[3] <= 512 and not (point[1] == 81.0 and point[2] > 2)
    }
    table = PrefillKeyTable(fits, SOURCE)
    for tokens, keys in KEY_CHUNKS.items():
        for decodes in DECODES:
            times = [at(table, tokens, keys[-1], decodes, length) for length in LENGTHS]
            assert all(low < high for low, high in pairwise(times))
            assert times == pytest.approx(
                [attention_by_key(tokens, keys[-1], decodes, length) for length in LENGTHS]
            )


@pytest.mark.parametrize("kept", [(True, False), (False, True), (True, True)])
def test_each_table_needs_rows(kept: tuple[bool, bool]) -> None:
    rest = {p: micros for p, micros in MEASURED.items() if (p[0] > 0, p[2] > 0) != kept}
    with pytest.raises(ConfigError, match=r"attention\.csv: rows with prefill_chunk 0, rows with n_decode 0"):
        PrefillKeyTable(rest, SOURCE)


def test_folders_by_key_are_read_as_they_are(tmp_path: Path) -> None:
    times = ProfileTimes.load(write_key_profile(tmp_path), model=MODEL)
    alone, beside = (times.step_time(StepRows(decodes, 64 * decodes, ((40, 10),), 1)) for decodes in (0, 1))
    dense = 3 * (2 * 0.25 + 2.0) + 0.5 + 1.0
    attention = attention_by_key(40, 30, 1, 64) - attention_by_key(40, 30, 0, 0)
    assert (beside - alone) * 1e6 == pytest.approx(dense + 3 * attention)


def test_decode_times_are_step_times_to_the_bit(tmp_path: Path) -> None:
    times = ProfileTimes.load(write_key_profile(tmp_path), model=MODEL)
    for sequences in (1, 3, 40):
        one_by_one = [
            times.step_time(StepRows(sequences, 37 * sequences + sequences * step, (), sequences))
            for step in range(400)
        ]
        assert times.decode_times(sequences, 37 * sequences, 400).tolist() == one_by_one


def test_experts_and_attention_by_key_go_together(tmp_path: Path) -> None:
    folder = write_key_profile(tmp_path / "tp1", "")
    (tmp_path / "meta.yaml").write_text("model: Qwen/Qwen3-30B-A3B-Instruct-2507\ntp_degrees: [1]\n")
    without = "\n".join(f"1,{tokens},{count},0" for tokens in (1, 64) for count in (8, 128))
    (folder / "moe.csv").write_text("ep,tokens,activated_experts,time_us\n" + without)
    free = ProfileTimes.load(tmp_path).step_time(StepRows(1, 64, ((40, 10),), 2))
    (folder / "moe.csv").write_text("ep,tokens,activated_experts,time_us\n" + without.replace(",0", ",7"))
    model = find_model_spec("qwen3-30b-a3b")
    assert model is not None
    assert model.layers == 48
    costly = ProfileTimes.load(tmp_path).step_time(StepRows(1, 64, ((40, 10),), 2))
    assert (costly - free) * 1e6 == pytest.approx(48 * 7)


HEADER = "layer,prefill_chunk,prefill_key,n_decode,kv_decode,decode_q_len,time_us\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            HEADER + "attention,16,16.0,0,0,1,9\nattention,16,far,0,0,1,9\n",
            r":3: prefill_key must be a number",
        ),
        (
            HEADER + "attention,16,-8.0,0,0,1,9\n",
            r":2: prefill_key must be a number of at least 0, got '-8.0'",
        ),
        (HEADER + "attention,16,inf,0,0,1,9\n", r":2: prefill_key must be a number of at least 0, got 'inf'"),
        (HEADER + "attention,16,,0,0,1,9\n", r":2: prefill_key must be a number of at least 0, got ''"),
        (HEADER + "attention,16.5,16.0,0,0,1,9\n", r":2: prefill_chunk must be a whole number, got '16.5'"),
        (HEADER + "attention,16,16.0,0,0,1\n", r":2: time_us must be a number of at least 0, got None"),
        (HEADER.replace("kv_decode,", "") + "attention,16,16.0,0,1,9\n", r":1: column kv_decode is missing"),
        (HEADER, r":2: no rows"),
        (HEADER + "indexer,16,16.0,0,0,1,9\n", r" has rows of indexer"),
        (HEADER + "attention,16,16.0,0,0,1,9\n", r": rows with prefill_chunk 0"),
    ],
)
def test_wrong_files_are_named_with_their_line(tmp_path: Path, text: str, problem: str) -> None:
    (write_key_profile(tmp_path) / "attention.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"attention\.csv" + problem):
        ProfileTimes.load(tmp_path, model=MODEL)
