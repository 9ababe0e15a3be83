"""The bound on inter-token latency (max_token_gap), where services take turns."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from schedule_builders import SECOND, make_pool, make_request, make_scheduler

from shoal.core import Idle, PromptLogprobs, StepResult, TokenLogprobs
from shoal.schedule import ORDERS, Aggressive, Conservative, Slice, WeightedTurns

MS = 1_000_000


class Prompts:
    """Log-probabilities of prompts, as an executor reports them."""

    def __init__(self):
        self.wanted = {}
        self.computed = {}

    def scores(self, plan):
        """By row of the plan."""
        for one in plan.joined:
            self.computed[one.seq_id] = one.computed
            if one.sampling.prompt_logprobs is not None:
                self.wanted[one.seq_id] = one.prompt_tokens
        scores = {}
        for row, (seq_id, count) in enumerate(zip(plan.seq_ids, plan.new_tokens, strict=True)):
            first = self.computed[seq_id] + 1
            self.computed[seq_id] += count
            count = min(count, self.wanted.get(seq_id, 0) - first)
            if count > 0:
                scores[row] = PromptLogprobs(first, [TokenLogprobs(7, -1.0)] * count)
        return scores


def serve(scheduler, arrivals, steps_ns):
    """Serve (time, request) pairs; steps_ns: duration of a service's steps, or a function of the plan.

    Returns the times of tokens by request, and the service of each step.
    """
    arrivals = sorted(arrivals, key=lambda pair: pair[0])
    times: dict[str, list[int]] = {}
    services = []
    prompts = Prompts()
    now = 0
    while arrivals or scheduler.unfinished:
        while arrivals and arrivals[0][0] <= now:
            scheduler.submit(arrivals.pop(0)[1], now)
        plan = scheduler.schedule(now)
        if isinstance(plan, Idle):
            now = arrivals[0][0]
            continue
        scores = prompts.scores(plan)
        duration_ns = steps_ns[plan.service]
        duration_ns = duration_ns(plan) if callable(duration_ns) else duration_ns
        now += duration_ns
        services.append(plan.service)
        result = replace(StepResult.of_step([7] * len(plan.sampled), duration_ns), prompt_logprobs=scores)
        for event in scheduler.update(plan, result, now):
            times.setdefault(event.request_id, []).extend([now] * len(event.tokens))
    return times, services


def largest_gap(times):
    gaps = [later - sooner for row in times.values() for sooner, later in pairwise(row)]
    return max(gaps, default=0)


def unequal(**options):
    """Two services of which the order strongly prefers one, with enough memory."""
    pool = make_pool(4_000, per_merged={"a": 1, "b": 1})
    return make_scheduler(pool, order=WeightedTurns(), execution_s={"a": 0.01, "b": 1.0}, **options)


def of_both():
    """A stream of each service, and many more short requests of the preferred one."""
    short = [(MS * (20 + at), make_request(4, 20, service="a", id=f"a{at}")) for at in range(0, 400, 4)]
    return [*short, (0, make_request(4, 40, service="b", id="stream"))]


@pytest.mark.parametrize("max_token_gap_s", [0.02, 0.1])
def test_a_stream_gets_its_tokens_although_the_order_prefers_another_service(max_token_gap_s):
    steps_ns = {"a": 2 * MS, "b": 3 * MS}
    frozen, _ = serve(unequal(), of_both(), steps_ns)
    assert largest_gap({"stream": frozen["stream"]}) > 300 * MS
    bounded, _ = serve(unequal(max_token_gap_s=max_token_gap_s), of_both(), steps_ns)
    assert largest_gap(bounded) <= max_token_gap_s * SECOND
    # The order still determines most of the time.
    assert largest_gap({"stream": bounded["stream"]}) > max_token_gap_s * SECOND / 2


def test_a_bound_shorter_than_a_round_becomes_two_rounds():
    steps_ns = {"a": 20 * MS, "b": 30 * MS}
    times, services = serve(unequal(max_token_gap_s=0.001), of_both(), steps_ns)
    assert largest_gap(times) <= 2 * (20 + 30) * MS
    busy = services[5:60]
    assert busy.count("a") > busy.count("b") > 0


def by_tokens(plan):
    """5 ms, and 2 ms for each prompt token."""
    return 5 * MS + 2 * MS * (sum(plan.new_tokens) - len(plan.new_tokens))


@pytest.mark.parametrize("slices", [False, True])
@pytest.mark.parametrize("longest", ["a", "b"])
def test_prompt_chunks_keep_streams_within_the_bound(longest, slices):
    """The stream is of service a, long prompts of the same or of another service."""

    def largest(max_token_gap_s):
        scheduler = make_scheduler(
            make_pool(4_000, per_merged={"a": 1, "b": 1}),
            context=9_000,
            admission=Slice(tokens=500) if slices else Aggressive(),
            max_batched_tokens=2_048,
            max_token_gap_s=max_token_gap_s,
            starvation_s=1_000.0,
        )
        arrivals = [
            (0, make_request(100, 1, service=longest)),  # measures the time per token
            (300 * MS, make_request(4, 400, service="a", id="stream")),
            (600 * MS, make_request(6_000, 5, service=longest)),
            (700 * MS, make_request(3_000, 5, service=longest)),
        ]
        times, _ = serve(scheduler, arrivals, {"a": by_tokens, "b": by_tokens})
        return largest_gap({"stream": times["stream"]})

    assert largest(1_000.0) > 4 * SECOND
    assert largest(1.0) <= 1.02 * SECOND
    assert largest(0.001) <= 400 * MS, "chunks have a least size"


def prompt_tokens_of(plan):
    return sum(count for count in plan.new_tokens if count > 1)


@pytest.mark.parametrize("crowd", [0, 200])
def test_a_single_slow_step_soon_has_no_effect(crowd):
    """Prompts come all the time, and a request always streams; decodes may take most of a step."""
    sizes = []

    def duration_ns(plan):
        prompt = prompt_tokens_of(plan)
        sizes.extend([prompt] if prompt else [])
        hiccup = 20 * SECOND if len(sizes) == 3 and prompt else 0
        return 10 * MS + plan.new_tokens.count(1) * 3 * MS + prompt * MS // 20 + hiccup

    scheduler = make_scheduler(
        make_pool(60_000),
        context=9_000,
        admission=Aggressive(),
        max_batched_tokens=2_048,
        max_running=400,
        max_token_gap_s=1.0,
        starvation_s=1_000.0,
    )
    streams = [(0, make_request(4, 600)) for _ in range(1 + crowd)]
    prompts = [((1 + at) * 200 * MS, make_request(2_000, 1)) for at in range(60)]
    serve(scheduler, [*streams, *prompts], {"a": duration_ns})
    assert max(sizes[-10:]) >= (600 if crowd else 1_900)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("scored", [False, True])
def test_chunks_of_scored_prompts_are_measured_separately(scored, known):
    """Logits take 19 times as long as the rest of a token, which other prompts do not show."""
    scheduler = make_scheduler(
        make_pool(4_000), context=9_000, max_batched_tokens=2_048, max_token_gap_s=4.0, starvation_s=1_000.0
    )
    wanted = {"prompt_logprobs": 0} if scored else {}
    arrivals = [(at * SECOND, make_request(100, 1)) for at in range(3 if known else 0)]
    arrivals += [
        (5 * SECOND, make_request(4, 2_000, id="stream")),
        (6 * SECOND, make_request(2_000, 2, **wanted)),
        (80 * SECOND, make_request(2_000, 1)),
        (100 * SECOND, make_request(2_000, 1)),
    ]
    chunks: dict[int, list[int]] = {}
    expensive = set()

    def duration_ns(plan):
        expensive.update(one.seq_id for one in plan.joined if one.sampling.prompt_logprobs is not None)
        rows = list(zip(plan.seq_ids, plan.new_tokens, strict=True))
        for seq_id, count in rows:
            if count > 1:
                chunks.setdefault(seq_id, []).append(count)
        return MS * sum(count * (20 if seq_id in expensive and count > 1 else 1) for seq_id, count in rows)

    times, _ = serve(scheduler, arrivals, {"a": duration_ns})
    *_, first, _, last = chunks.values()
    assert first[0] == (200 if scored or not known else 2_000), "10 ms a token, if none was measured"
    assert not scored or max(first[1:]) in range(100, 102), "2 s"
    assert last == [2_000], "others are not cut because of it"
    assert largest_gap({"stream": times["stream"]}) <= 4.1 * SECOND


@pytest.mark.parametrize("scored", [False, True])
def test_a_starved_prompt_gets_a_full_step_unless_it_is_scored(scored):
    wanted = {"prompt_logprobs": 0} if scored else {}
    scheduler = make_scheduler(
        make_pool(4_000, per_merged={"a": 1, "b": 1}),
        order=WeightedTurns(),
        execution_s={"a": 0.01, "b": 100.0},
        context=9_000,
        max_batched_tokens=2_048,
        max_token_gap_s=1.0,
        starvation_s=5.0,
    )
    streams = [(at * 400 * MS, make_request(4, 100, service="a")) for at in range(60)]
    arrivals = [(0, make_request(100, 1, service="b")), *streams]
    arrivals.append((SECOND, make_request(2_000, 2, service="b", id="long", **wanted)))
    times, _ = serve(scheduler, arrivals, {"a": by_tokens, "b": by_tokens})
    if scored:
        gaps = [later - earlier for at in times.values() for earlier, later in pairwise(at)]
        assert max(gaps) <= 1.1 * SECOND
    else:
        assert times["long"][0] < 15 * SECOND


def test_prompts_are_not_cut_without_streams():
    scheduler = make_scheduler(make_pool(4_000), context=9_000, max_batched_tokens=2_048, max_token_gap_s=1.0)
    arrivals = [(0, make_request(4_096, 1)), (20 * SECOND, make_request(4_096, 1))]
    _, services = serve(scheduler, arrivals, {"a": by_tokens})
    assert len(services) == 4


@given(
    order=st.sampled_from(sorted(ORDERS)),
    steps=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    most_ms=st.integers(10, 300),
    requests=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 3), st.integers(1, 12), st.integers(1, 30)),
        min_size=1,
        max_size=25,
    ),
)
# The first turn is for a prompt of "a" without a free slot, so it makes no plan; then "c" steps, not "a".
@example(
    order="round-robin",
    steps=[1, 1, 4],
    most_ms=10,
    requests=[(0, 0, 1, 1)] * 4 + [(0, 0, 1, 4)] * 12 + [(0, 0, 1, 2)] * 3 + [(0, 2, 1, 5), (0, 0, 1, 1)],
)
def test_no_order_exceeds_the_bound_while_memory_suffices(order, steps, most_ms, requests):
    names = "abcd"[: len(steps)]
    scheduler = make_scheduler(
        make_pool(4_000, per_merged=dict.fromkeys(names, 1)),
        order=order,
        admission=Conservative(),
        max_token_gap_s=most_ms / 1e3,
        starvation_s=1_000.0,
    )
    steps_ns = {name: step * MS for name, step in zip(names, steps, strict=True)}
    arrivals = [
        (at * MS, make_request(prompt, output, service=names[service % len(names)], id=f"r{number}"))
        for number, (at, service, prompt, output) in enumerate(requests)
    ]
    times, _ = serve(scheduler, arrivals, steps_ns)
    assert len(times) == len(requests)
    # The duration of a service's first step is unknown before.
    assert largest_gap(times) <= max(most_ms, 2 * sum(steps)) * MS + max(steps) * MS
