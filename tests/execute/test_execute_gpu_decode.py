"""Decode attention over a work list is what the formulas say: on a GPU, or in Triton's interpreter."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pytest
import torch
from execute_builders import needs_triton
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_builders import BEYOND_INT32, TOLERANCE, Decodes
from strict_interpreter import strict_interpreter

from at_hand import DEVICE
from hypothesis_profiles import examples

if TYPE_CHECKING:
    from shoal.execute.gpu.kernels.decode import DecodeWork

pytestmark = needs_triton

DTYPES = ["float32", "float16"] if DEVICE == "cpu" else list(TOLERANCE)
"""The interpreter of Triton 3.7 multiplies the bits of bfloat16 as if they were integers."""
LAYOUTS = pytest.mark.parametrize("layout", ["merged", "split"])


@pytest.fixture(scope="module", autouse=True)
def _strict() -> Iterator[None]:
    if DEVICE != "cpu":
        yield
        return
    with strict_interpreter():
        yield


def planned(lengths: Sequence[int], window: int | None, programs: int) -> "DecodeWork":
    from shoal.execute.gpu.kernels.decode import plan_work

    return plan_work(torch.tensor(lengths, dtype=torch.int32, device=DEVICE), window, programs)


def attend(
    case: Decodes, programs: int, padding: Sequence[int] = (), keys: int | None = None
) -> torch.Tensor:
    """The output of a case, in a slice of a larger tensor, with the rows of tables in another order.

    padding: rows that get a negative table row.
    """
    from shoal.execute.gpu.kernels.decode import attend_decodes

    rows, heads, _ = case.query.shape
    tables, table_rows = case.in_other_rows()
    table_rows[list(padding)] = -1
    whole = torch.full((rows + 3, heads, case.value_dim), 7.0, dtype=case.query.dtype, device=DEVICE)
    out = attend_decodes(
        case.query,
        case.kv,
        tables,
        table_rows,
        planned(case.lengths, case.window, programs),
        scaling=case.scaling,
        softcap=case.softcap,
        out=whole[1:-2],
        keys=keys,
    )
    assert out.data_ptr() == whole[1:].data_ptr()
    assert (whole[[0, -2, -1]] == 7.0).all(), "rows of others were written"
    return out


def check(case: Decodes, programs: int, padding: Sequence[int] = (), keys: int | None = None) -> None:
    expected = case.expected()
    expected[list(padding)] = 0
    out = attend(case, programs, padding, keys)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[case.dtype])


@settings(max_examples=examples(150), deadline=None)
@given(
    lengths=st.one_of(
        st.lists(st.integers(0, 3000), max_size=6),
        st.lists(st.sampled_from([0, 1, 64, 255, 256, 257, 512, 513, 40_000]), max_size=20),
    ),
    window=st.sampled_from([None, 1, 64, 300, 4096]),
    programs=st.integers(1, 70),
    vector=st.sampled_from([4, 16, 256]),
)
def test_each_attended_token_is_in_one_item(
    lengths: list[int], window: int | None, programs: int, vector: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.execute.gpu.kernels.decode._VECTOR", vector)
        work = planned(lengths, window, programs)
    items, firsts = work.items.tolist(), work.firsts.tolist()
    assert len(items) == len(lengths) + programs
    attended = [min(length, window or length) for length in lengths]
    chunk = max(256, -(-sum(attended) // (64 * programs)) * 64)
    parts = [-(-tokens // chunk) for tokens in attended]
    assert firsts == [sum(parts[:row]) for row in range(len(lengths) + 1)]
    assert firsts[-1] <= len(items)
    assert all(row == -1 for row, *_ in items[firsts[-1] :])
    covered: list[list[int]] = [[] for _ in lengths]
    for index, (row, begin, end, alone) in enumerate(items[: firsts[-1]]):
        assert firsts[row] <= index < firsts[row + 1]
        assert 0 < end - begin <= chunk
        assert alone == (parts[row] == 1)
        covered[row] += range(begin, end)
    for length, tokens, found in zip(lengths, attended, covered, strict=True):
        assert found == list(range(length - tokens, length))


def test_a_long_context_among_short_ones_is_divided() -> None:
    work = planned([32_768, *[128] * 15], None, 66)
    items = work.items[: int(work.firsts[-1])]
    assert int((items[:, 2] - items[:, 1]).max()) == 576  # a share of 34,688 tokens is 526
    assert int((items[:, 0] == 0).sum()) == 57


decodes = {
    "lengths": st.lists(
        st.sampled_from([0, 1, 2, 15, 16, 17, 63, 64, 65, 129, 257, 520]), min_size=1, max_size=4
    ),
    "group": st.sampled_from([1, 2, 3, 4, 7, 8, 20]),
    "kv_heads": st.integers(1, 3),
    "key_dim": st.sampled_from([8, 16, 33, 64, 72, 96, 128, 256]),
    "value_dim": st.sampled_from([8, 16, 33, 64, 72, 96, 128, 256]),
    "block_size": st.sampled_from([1, 3, 16, 64]),
    "window": st.sampled_from([None, None, 1, 5, 70, 300]),
    "softcap": st.sampled_from([None, None, 2.0, 30.0]),
    "scaling": st.sampled_from([None, 0.3]),
    "dtype": st.sampled_from(DTYPES),
    "gap": st.sampled_from([0, 1, 8]),
    "turned": st.sampled_from([False, False, True]),
    "forgets": st.just(True),
    "seed": st.integers(0, 3),
}


@LAYOUTS
@settings(max_examples=examples(75), deadline=None)
@given(
    data=st.data(),
    programs=st.sampled_from([1, 2, 5, 20]),
    keys=st.sampled_from([None, None, 16, 128]),
)
def test_decodes_match_the_formulas(
    layout: str, data: st.DataObject, programs: int, keys: int | None
) -> None:
    case = data.draw(st.builds(Decodes, layout=st.just(layout), **decodes))
    padding = data.draw(st.sets(st.integers(0, len(case.lengths) - 1)))
    check(case, programs, sorted(padding), keys)


@LAYOUTS
def test_one_long_context_beside_short_ones(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long one has more items than are combined at once."""
    monkeypatch.setattr("shoal.execute.gpu.kernels.decode._PARTS", 2)
    check(Decodes(lengths=[1500, 3, 0, 256, 257], group=4, layout=layout, block_size=16, scaling=1.0), 20)


@LAYOUTS
def test_extreme_scores(layout: str) -> None:
    check(Decodes(lengths=[700, 1, 0, 1], layout=layout, scaling=1000.0), 3)


@LAYOUTS
def test_offsets_of_keys_may_exceed_32_bits(layout: str) -> None:
    try:
        case = Decodes(lengths=[300, 5], layout=layout, dtype="float16", unused=BEYOND_INT32)
    except (OSError, torch.OutOfMemoryError) as error:
        pytest.skip(f"there is no room for so large a pool: {error}")
    check(case, 2)


def test_a_row_does_not_depend_on_the_values_of_others() -> None:
    """Bit for bit: what differs is another row's query."""
    case = Decodes(lengths=[600, 300], block_size=16)
    first = attend(case, 4)[0].clone()
    case.query[1] *= 3
    assert torch.equal(attend(case, 4)[0], first)


def test_steps_without_rows() -> None:
    from shoal.execute.gpu.kernels.decode import attend_decodes

    case = Decodes(lengths=[3])
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    work = planned([], None, 4)
    out = attend_decodes(case.query[:0], case.kv, case.tables, none, work, scaling=None, softcap=None)
    assert out.shape == (0, *case.query.shape[1:])


def test_fewer_programs_are_needed_for_more_kv_heads() -> None:
    from shoal.execute.gpu.kernels.decode import programs_of

    counts = [programs_of(torch.device(DEVICE), kv_heads) for kv_heads in (1, 2, 1_000_000)]
    assert counts[0] >= 2 * counts[1] > 0
    assert counts[2] == 1
