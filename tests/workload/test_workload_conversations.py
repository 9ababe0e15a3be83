"""Conversations: the prompt of every answer is the whole conversation before it."""

from pathlib import Path

import pytest
import workload_builders as build

from shoal.workload import block_hashes, load_trace, read_trace


def test_prompts_are_the_conversation_so_far(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.TURNS))
    assert build.lengths(trace.rows) == [(34, 244), (34 + 244 + 36, 320), (7 + 9, 11)]
    assert [row.client for row in trace.rows] == ["0", "0", "1"]
    assert trace.skipped == 1, "an answer to nothing"
    assert not trace.timed


def test_later_prompts_begin_with_earlier_ones(tmp_path: Path) -> None:
    first, second, other = (block_hashes(row, 16) for row in read_trace(build.write(tmp_path, build.TURNS)))
    assert (len(first), len(second), len(other)) == (34 // 16, 314 // 16, 1)
    assert second[: len(first)] == first
    assert not set(other) & set(second)


def test_interleaved_conversations(tmp_path: Path) -> None:
    text = "conv,turn,role,tokens\na,0,human,5\nb,0,human,6\na,1,gpt,7\nb,1,gpt,8\na,2,human,1\na,3,gpt,2\n"
    rows = read_trace(build.write(tmp_path, text))
    assert [(row.client, row.prompt_tokens, row.output_tokens) for row in rows] == [
        ("a", 5, 7),
        ("b", 6, 8),
        ("a", 13, 2),
    ]


def test_sharegpt_without_a_tokenizer_counts_characters_with_a_note(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.SHAREGPT))
    assert build.lengths(trace.rows) == [(10, 20), (10 + 20 + 1, 2)]
    assert trace.skipped == 1, "an empty answer"
    assert "characters / 4" in trace.note
    assert [row.client for row in trace.rows] == ["x", "x"]


@pytest.mark.parametrize("turns", ["conversations", "conversation", "messages"])
def test_turns_may_have_the_keys_of_openai(turns: str, tmp_path: Path) -> None:
    renamed = {
        "from": "role",
        "value": "content",
        "conversations": turns,
        "human": "user",
        "gpt": "assistant",
    }
    text = build.SHAREGPT
    for name, other in renamed.items():
        text = text.replace(f'"{name}"', f'"{other}"')
    expected = load_trace(build.write(tmp_path, build.SHAREGPT))
    found = load_trace(build.write(tmp_path, text))
    assert '"from"' not in text
    assert (found.rows, found.skipped) == (expected.rows, expected.skipped)


def test_sharegpt_with_a_tokenizer(tmp_path: Path) -> None:
    trace = load_trace(build.write(tmp_path, build.SHAREGPT), count_tokens=len)
    assert build.lengths(trace.rows) == [(40, 80), (122, 8)]
    assert "characters" not in trace.note


@pytest.mark.parametrize("text", ["[]", " [ ] ", "[]\n"])
def test_no_conversations(text: str, tmp_path: Path) -> None:
    assert read_trace(build.write(tmp_path, text)) == []
