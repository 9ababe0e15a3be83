"""References of transformers: what an output may not be."""

from pathlib import Path

import pytest
from execute_builders import make_model, make_prompt, reference_tokens, tiny_config
from references import assert_greedy

PROMPT = make_prompt(9)
OUTPUT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("references"), tiny_config("gemma3"))


@pytest.fixture(scope="module")
def generated(folder: Path) -> list[int]:
    """Step by step, with a cache of keys and values."""
    return reference_tokens(folder, PROMPT, OUTPUT)


def test_what_is_generated_is_greedy(folder: Path, generated: list[int]) -> None:
    assert_greedy(folder, PROMPT, generated, OUTPUT)


@pytest.mark.parametrize("at", range(OUTPUT))
def test_no_token_may_be_another(at: int, folder: Path, generated: list[int]) -> None:
    other = [*generated[:at], generated[at] % 100 + 3, *generated[at + 1 :]]
    with pytest.raises(AssertionError):
        assert_greedy(folder, PROMPT, other, OUTPUT)


@pytest.mark.parametrize("count", [0, OUTPUT - 1])
def test_none_may_be_missing_or_too_much(count: int, folder: Path, generated: list[int]) -> None:
    with pytest.raises(AssertionError):
        assert_greedy(folder, PROMPT, generated[:count], OUTPUT)
    with pytest.raises(AssertionError):
        assert_greedy(folder, PROMPT, generated, count)


def test_it_is_over_with_the_token_that_ends_it(folder: Path, generated: list[int]) -> None:
    end = next(token for token in generated[2:] if token != generated[0])
    whole = generated[: generated.index(end) + 1]
    assert_greedy(folder, PROMPT, whole, OUTPUT, end)
    for other in (generated, whole[:-1], []):
        with pytest.raises(AssertionError):
            assert_greedy(folder, PROMPT, other, OUTPUT, end)
