"""Lengths of a request against the limits of its service."""

import pytest

from shoal.core import InvalidRequest, ResumeState, SamplingParams
from shoal.core.length_limits import LengthLimits

TOTAL = 4
LIMITS = LengthLimits("a", context_tokens=9, max_total_tokens=TOTAL)


def accepts(prompt: int, sampling: SamplingParams, output: int, resumed: ResumeState | None) -> bool:
    try:
        room = LIMITS.check(prompt, sampling, output, resumed)
    except InvalidRequest:
        return False
    assert room == TOTAL - prompt
    return True


def fits(prompt: int, sampling: SamplingParams, output: int, promised: int | None) -> bool:
    """Whether some length of the output is at least what is asked for, and its limit fits."""
    limits = [limit for limit in (promised, sampling.max_tokens, TOTAL - prompt) if limit is not None]
    return prompt > 0 and max(1, sampling.min_tokens, output) <= limits[0] <= TOTAL - prompt


@pytest.mark.parametrize("promised", [None, 1, 2, 4])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 5])
def test_a_request_is_accepted_if_its_longest_output_fits(max_tokens, promised):
    resumed = None if promised is None else ResumeState(max_new_tokens=promised)
    if None not in (max_tokens, promised):
        max_tokens = promised  # as when it was first submitted
    for prompt in range(7):
        for output in range(6):
            for low in range(max_tokens or promised or 6):
                sampling = SamplingParams(max_tokens=max_tokens, min_tokens=low)
                expected = fits(prompt, sampling, output, promised)
                assert accepts(prompt, sampling, output, resumed) == expected


@pytest.mark.parametrize(
    ("limits", "words"),
    [(LIMITS, "all that the KV memory can hold"), (LengthLimits("a", TOTAL, TOTAL), "its context length")],
)
def test_the_message_says_what_the_limit_is(limits, words):
    with pytest.raises(InvalidRequest, match=words) as caught:
        limits.check_prompt(4, at_least=True)
    assert "at least 4 tokens" in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
