"""KV block hashes against brute force over made-up tokens."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.workload import TraceRow, block_hashes

CHAINS = st.lists(st.integers(0, 2), max_size=5)


def tokens_of(row: TraceRow, unique: int) -> list[object]:
    """What the prompt could be made of: a token is the same where its trace block and all before are."""
    tokens: list[object] = []
    for place in range(row.prompt_tokens):
        block = place // row.hash_tokens
        known = block < len(row.hashes)
        tokens.append((row.hashes[: block + 1], place) if known else (unique, place))
    return tokens


@st.composite
def rows(draw: st.DrawFn, hash_tokens: int) -> TraceRow:
    hashes = tuple(draw(CHAINS))
    return TraceRow(0, draw(st.integers(1, 6 * hash_tokens)), 1, None, hashes, hash_tokens)


@given(st.data(), st.sampled_from([1, 4, 6, 8]), st.integers(1, 13))
def test_blocks_are_shared_exactly_as_long_as_prompts_are_equal(
    data: st.DataObject, hash_tokens: int, block_size: int
) -> None:
    left, right = data.draw(rows(hash_tokens)), data.draw(rows(hash_tokens))
    mine, theirs = block_hashes(left, block_size), block_hashes(right, block_size)
    tokens, others = tokens_of(left, 1), tokens_of(right, 2)
    for index in range(max(len(mine), len(theirs))):
        end = (index + 1) * block_size
        equal = end <= min(len(tokens), len(others)) and tokens[:end] == others[:end]
        assert (mine[index : index + 1] == theirs[index : index + 1]) == equal


@given(st.data(), st.sampled_from([1, 4, 6, 8, 512]), st.integers(1, 600))
def test_only_full_blocks_within_the_hashes(data: st.DataObject, hash_tokens: int, block_size: int) -> None:
    row = data.draw(rows(hash_tokens))
    hashes = block_hashes(row, block_size)
    assert len(hashes) == min(row.prompt_tokens, len(row.hashes) * hash_tokens) // block_size
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= number < 2**64 for number in hashes)


def test_an_inner_difference_ends_sharing_for_good() -> None:
    same_end = [block_hashes(TraceRow(0, 1536, 1, None, (1, middle, 3)), 16) for middle in (2, 9)]
    shared = [left == right for left, right in zip(*same_end, strict=True)]
    assert shared == [True] * 32 + [False] * 64


def test_block_that_straddles_needs_both_trace_blocks() -> None:
    left, right = (block_hashes(TraceRow(0, 1024, 1, None, (1, second)), 100) for second in (2, 3))
    assert [mine == yours for mine, yours in zip(left, right, strict=True)] == [True] * 5 + [False] * 5
