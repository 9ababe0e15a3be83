"""Step times from measured layer tables: sums, interpolation, files that are wrong."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layer_tables import DENSE, HEAD, MODEL, attention, write_profile
from shoal.core import ConfigError
from shoal.forecast.profile_files.attention import Line
from shoal.forecast.profile_files.reading import Curve
from shoal.forecast.profile_files.tables import ProfileTimes
from shoal.forecast.step_times import StepRows


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> ProfileTimes:
    return ProfileTimes.load(write_profile(tmp_path_factory.mktemp("profile")), model=MODEL)


def linear(parts: dict[str, tuple[float, float]], name: str, count: int) -> float:
    return parts[name][0] + parts[name][1] * count


def expected(tokens: int, sampled: int, attention_us: float) -> float:
    layer = 2 * linear(DENSE, "layernorm", tokens) + linear(DENSE, "qkv_proj", tokens) + attention_us
    once = linear(DENSE, "embedding", tokens) + linear(DENSE, "final_layernorm", tokens)
    head = sum(linear(HEAD, name, sampled) for name in HEAD)
    return (3 * layer + once + head) / 1e6


@pytest.mark.parametrize(("decodes", "context"), [(1, 16), (2, 100), (3, 3 * 77), (4, 4 * 250), (6, 6 * 400)])
def test_decode_step_is_the_sum_of_its_parts(times: ProfileTimes, decodes: int, context: int) -> None:
    micros = attention(0, 0, 1, 0) + 0.02 * context
    found = times.step_time(StepRows(decodes, context, (), decodes))
    assert found == pytest.approx(expected(decodes, decodes, micros), rel=1e-12)


@pytest.mark.parametrize(("chunk", "before"), [(16, 0), (48, 40), (64, 64), (90, 100)])
def test_mixed_step_is_the_sum_of_its_parts(times: ProfileTimes, chunk: int, before: int) -> None:
    found = times.step_time(StepRows(2, 2 * 128, ((chunk, before),), 3))
    assert found == pytest.approx(expected(chunk + 2, 3, attention(chunk, before, 2, 128)), rel=1e-12)


def test_no_logits_cost_nothing(times: ProfileTimes) -> None:
    without, with_one = (times.step_time(StepRows(0, 0, ((32, 0),), sampled)) for sampled in (0, 1))
    assert with_one - without == pytest.approx(sum(linear(HEAD, name, 1) for name in HEAD) / 1e6)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 5000), st.integers(1, 40))
def test_decode_times_are_step_times_to_the_bit(
    times: ProfileTimes, sequences: int, beyond: int, steps: int
) -> None:
    context = sequences + beyond
    one_by_one = [
        times.step_time(StepRows(sequences, context + sequences * step, (), sequences))
        for step in range(steps)
    ]
    assert times.decode_times(sequences, context, steps).tolist() == one_by_one


@given(st.lists(st.floats(0, 2000), min_size=1, max_size=20))
def test_line_agrees_with_numpy_between_its_points(xs: list[float]) -> None:
    points, values = np.array([16.0, 64.0, 1000.0]), np.array([1.0, 3.0, 2.0])
    line = Line(points, values)
    inside = np.clip(xs, 16, 1000)
    assert line.many(inside) == pytest.approx(np.interp(inside, points, values))
    assert line.many(np.array(xs)).tolist() == [line.at(x) for x in xs]


def test_curve_goes_on_past_its_end_and_starts_at_nothing() -> None:
    curve = Curve(np.array([2.0, 4.0]), np.array([10.0, 14.0]))
    assert curve.at_integers(6).tolist() == [0.0, 10.0, 10.0, 12.0, 14.0, 16.0, 18.0]


def test_degrees_lie_in_folders_and_reductions_are_added(tmp_path: Path) -> None:
    for degree in (1, 2):
        write_profile(tmp_path / f"tp{degree}")
    (tmp_path / "meta.yaml").write_text("model: tiny\nhardware: RTX4090\n")
    one, two = (ProfileTimes.load(tmp_path, tp, model=MODEL) for tp in (1, 2))
    rows = StepRows(2, 64, (), 2)
    assert two.step_time(rows) > one.step_time(rows)
    with pytest.raises(ConfigError, match="no tables for tp=4; it has tp=1, 2"):
        ProfileTimes.load(tmp_path, 4, model=MODEL)


def test_measured_reductions_are_taken_as_they_are(tmp_path: Path) -> None:
    write_profile(tmp_path / "tp2")
    dense = tmp_path / "tp2" / "dense.csv"
    dense.write_text(dense.read_text() + "\nall_reduce,1,10\nall_reduce,128,137\n")
    write_profile(tmp_path / "plain")
    plain = ProfileTimes.load(tmp_path / "plain", model=MODEL)
    found = ProfileTimes.load(tmp_path, 2, model=MODEL)
    # A row is one reduction of hidden states: two in each of 3 layers, one of the embedding. The logits, 200
    # numbers sent once, are as many bytes as 1.6 tokens of 64 numbers sent twice.
    rows = StepRows(2, 64, (), 2)
    assert found.step_time(rows) - plain.step_time(rows) == pytest.approx((7 * 11 + 11) * 1e-6)


def test_only_single_queries_of_newer_attention_files_count(tmp_path: Path) -> None:
    write_profile(tmp_path / "old")
    path = write_profile(tmp_path / "new") / "attention.csv"
    header, *rows = path.read_text().splitlines()
    columns = header.removesuffix(",time_us") + ",decode_q_len,time_us"
    several = [row.rpartition(",")[0] + ",4,1000000" for row in rows]
    single = [row.replace(f",{row.rpartition(',')[2]}", f",1,{row.rpartition(',')[2]}") for row in rows]
    path.write_text("\n".join(["layer," + columns, *(f"attention,{row}" for row in [*single, *several])]))
    old, new = (ProfileTimes.load(tmp_path / name, model=MODEL) for name in ("old", "new"))
    steps = [StepRows(3, 200, (), 3), StepRows(2, 128, ((40, 16),), 3)]
    assert [new.step_time(rows) for rows in steps] == [old.step_time(rows) for rows in steps]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("dense.csv", "layer,tokens\nqkv_proj,1\n", r"dense\.csv:1: column time_us is missing"),
        ("dense.csv", "layer,tokens,time_us\n", r"dense\.csv:2: no rows"),
        ("dense.csv", "layer,tokens,time_us\nqkv,1,2\nqkv,x,2\n", r"dense\.csv:3: tokens must be a whole"),
        (
            "per_sequence.csv",
            "layer,sequences,time_us\nlm_head,1,nan\n",
            r"per_sequence\.csv:2: time_us must",
        ),
        (
            "per_sequence.csv",
            "layer,sequences,time_us\nlm_head,-1,2\n",
            r"per_sequence\.csv:2: sequences must",
        ),
        (
            "attention.csv",
            "layer,prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\nindexer,0,0,1,16,9\n",
            r"attention\.csv has rows of indexer",
        ),
        ("linear_attention.csv", "layer\n", r"linear_attention\.csv: layers of linear attention"),
        ("meta.yaml", "model: [\n", "not YAML"),
        ("meta.yaml", "model: unheard-of\n", "'unheard-of' is not a model on record"),
    ],
)
def test_wrong_files_are_named_with_their_line(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (write_profile(tmp_path) / name).write_text(text)
    with pytest.raises(ConfigError, match=problem):
        ProfileTimes.load(tmp_path)


def test_missing_files_and_points_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no profile"):
        ProfileTimes.load(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        ProfileTimes.load(tmp_path / "nowhere")
    (write_profile(tmp_path) / "attention.csv").unlink()
    with pytest.raises(
        ConfigError, match=r"attention\.csv is missing; it must have the columns prefill_chunk"
    ):
        ProfileTimes.load(tmp_path, model=MODEL)
