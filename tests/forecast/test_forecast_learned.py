from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.core import ConfigError, Request, SamplingParams, SyntheticPrompt
from shoal.forecast import Accuracy, LearnedLengths

MAXIMUM = 500
TEMPLATE = [1, 9690, 198]
KINDS = ((7_001, 7_002, 7_003), (8_001, 8_002, 8_003))


def make_request(prompt, *, limit=None):
    return Request(id="r", service="chat", prompt=prompt, sampling=SamplingParams(max_tokens=limit))


def make_prompt(kind, random, *, filler=20):
    """A template, words that belong to the kind, and words that say nothing, shuffled."""
    words = [*KINDS[kind], *(random.randrange(2_000) for _ in range(filler))]
    random.shuffle(words)
    return TEMPLATE + words + TEMPLATE[::-1]


def two_kinds(count, seed=0, *, short=8, long=300):
    """(request, output tokens) of two kinds of prompt in random order."""
    random = Random(seed)
    kinds = [random.randrange(2) for _ in range(count)]
    return [(make_request(make_prompt(kind, random)), (short, long)[kind]) for kind in kinds]


def trained(stream, **options):
    predictor = LearnedLengths(MAXIMUM, **options)
    for request, length in stream:
        predictor.record(request, length)
    return predictor


@pytest.mark.parametrize(
    ("maximum", "bounds"),
    [(1, (1,)), (16, (16,)), (17, (16, 17)), (192, (16, 32, 64, 128, 192)), (64, (16, 32, 64))],
)
def test_buckets_double_up_to_the_maximum(maximum, bounds):
    assert LearnedLengths(maximum).bounds == bounds


@given(st.integers(1, 5_000), st.integers(1, 6_000))
@settings(max_examples=examples(50))
def test_a_length_is_in_the_first_bucket_that_reaches_it(maximum, tokens):
    predictor = LearnedLengths(maximum)
    reaching = [place for place, bound in enumerate(predictor.bounds) if bound >= tokens]
    assert predictor.bucket_of(tokens) == (reaching or [len(predictor.bounds) - 1])[0]


def test_before_training_a_request_is_predicted_to_reach_max_new_tokens():
    predictor = trained(two_kinds(7), batch=8)
    [(request, _)] = two_kinds(1, seed=5)
    assert predictor.predict(request, 0, 321) == 321


def test_two_kinds_of_prompts_are_distinguished():
    predictor = trained(two_kinds(200))
    fresh = two_kinds(100, seed=1)
    right = sum(predictor.predict(request, 0, MAXIMUM) == (16 if n == 8 else MAXIMUM) for request, n in fresh)
    assert right >= 95
    assert predictor.predict(fresh[0][0], 0, 5) <= 5


def test_two_buckets_and_one_work_as_well():
    random = Random(3)
    prompts = [(kind, make_prompt(kind, random)) for kind in [0, 1] * 80]
    two_buckets, single = LearnedLengths(30), LearnedLengths(10)
    for kind, prompt in prompts:
        two_buckets.record(make_request(prompt), (5, 25)[kind])
        single.record(make_request(prompt), (5, 9)[kind])
    assert [two_buckets.predict(make_request(make_prompt(kind, random)), 0, 30) for kind in (0, 1)] == [
        16,
        30,
    ]
    assert single.predict(make_request(prompts[0][1]), 0, 10) == 10
    assert single.accuracy.hit_rate == 1.0


def test_a_synthetic_prompt_is_known_by_its_length():
    random = Random(0)
    predictor = LearnedLengths(MAXIMUM)
    for _ in range(100):
        predictor.record(make_request(SyntheticPrompt(random.randint(10, 15))), 300)
        predictor.record(make_request(SyntheticPrompt(random.randint(1_100, 1_400))), 20)
    assert predictor.predict(make_request(SyntheticPrompt(12)), 0, MAXIMUM) == MAXIMUM
    assert predictor.predict(make_request(SyntheticPrompt(1_250)), 0, MAXIMUM) == 32


def test_max_tokens_is_a_sign_of_the_output():
    random = Random(0)
    predictor = LearnedLengths(MAXIMUM)
    for number in range(200):
        limit, length = ((20, 20), (450, 300))[number % 2]
        predictor.record(make_request(make_prompt(0, random), limit=limit), length)
    predicted = [
        predictor.predict(make_request(make_prompt(0, random), limit=limit), 0, MAXIMUM)
        for limit in (20, 450) * 20
    ]
    assert sum(length == right for length, right in zip(predicted, (32, MAXIMUM) * 20, strict=True)) >= 36


def test_it_follows_traffic_that_turns_around():
    predictor = trained(two_kinds(300) + two_kinds(300, seed=1, short=300, long=8))
    fresh = two_kinds(100, seed=2, short=300, long=8)
    right = sum(predictor.predict(request, 0, MAXIMUM) == (16 if n == 8 else MAXIMUM) for request, n in fresh)
    assert right >= 85


def test_an_outgrown_prediction_is_corrected_to_the_next_bucket():
    predictor = trained(two_kinds(200))
    request = next(request for request, length in two_kinds(20, seed=1) if length == 8)
    predicted, seen = 0, []
    while predicted < 400:
        predicted = predictor.predict(request, predicted, 400)
        seen.append(predicted)
    assert seen == [16, 32, 64, 128, 256, 400]
    assert predictor.corrections == 5
    assert predictor.predict(request, MAXIMUM, MAXIMUM + 70) == MAXIMUM + 70


def test_accuracy_is_judged_before_learning_and_over_the_window():
    stream = two_kinds(90)
    window = 30
    asked, judged = LearnedLengths(MAXIMUM, window=window), []
    for request, length in stream:
        predicted = asked.bucket_of(asked.predict(request, 0, MAXIMUM))
        judged.append((predicted == asked.bucket_of(length), length))
        asked.record(request, length)
        recent = judged[-window:]
        longs = sum(length == 300 for _, length in recent)
        hits = sum(hit for hit, _ in recent)
        assert asked.accuracy == Accuracy(hits, max(longs, len(recent) - longs), len(recent))
    assert asked.accuracy.hit_rate > asked.accuracy.majority_share + 0.2


def test_accuracy_of_nothing_is_nothing():
    assert LearnedLengths(MAXIMUM).accuracy == Accuracy(0, 0, 0)
    assert LearnedLengths(MAXIMUM).accuracy.hit_rate == 0.0
    assert LearnedLengths(MAXIMUM).accuracy.majority_share == 0.0


def test_what_max_tokens_cut_short_counts_as_predicted():
    predictor = LearnedLengths(MAXIMUM)
    predictor.record(make_request([1, 2], limit=10), 10)
    assert predictor.accuracy == Accuracy(hits=1, majority=1, samples=1)


def test_predictions_do_not_depend_on_reading_accuracy():
    stream = two_kinds(60)
    twice, once = trained(stream), LearnedLengths(MAXIMUM)
    for request, length in stream:
        for other, _ in stream[:3]:
            once.predict(other, 0, MAXIMUM)
        once.record(request, length)
    fresh = [request for request, _ in two_kinds(50, seed=9)]
    assert [twice.predict(r, 0, MAXIMUM) for r in fresh] == [once.predict(r, 0, MAXIMUM) for r in fresh]
    assert twice.accuracy == once.accuracy


@pytest.mark.parametrize("length", [0, 1, 2, 511, 512, 513, 5_000])
def test_prompts_of_any_length_and_type_can_be_predicted_and_learned(length):
    predictor = LearnedLengths(MAXIMUM, batch=1)
    prompt = list(range(length))
    predictor.record(make_request(prompt), 20)
    predictor.record(make_request(tuple(prompt)), 20)
    assert predictor.predict(make_request(prompt), 0, MAXIMUM) == 32


@pytest.mark.parametrize("options", [{"maximum": 0}, {"maximum": 9, "batch": 0}, {"maximum": 9, "window": 0}])
def test_numbers_without_meaning_are_refused(options):
    with pytest.raises(ConfigError, match="at least 1"):
        LearnedLengths(**options)
