"""Static batches in process: every request answered once, with exact figures, whatever the workers do."""

import threading
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from engine_builders import EOS, VOCAB, ByteTokenizer, expected_tokens, next_token
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.padded.calibrate import calibrate
from experiments.padded.engine import StaticEngine, max_request_tokens
from experiments.padded.executor import StaticResult
from experiments.padded.interval import AdaptiveInterval
from experiments.padded.offline import StaticSetup
from experiments.padded.presets import STATIC_PRESETS, static_preset
from experiments.padded.workers import BatchWork, StaticWorkers
from hypothesis_profiles import examples
from shoal.batches import MemoryByBytes, MemoryByRule
from shoal.core import SLO, ConfigError, FinishReason, InvalidRequest, Request, SamplingParams, Service
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.forecast.latency_padded import Bilinear, PaddedLatency

LADDER = ("sls", "so", "pm", "ab", "lb", "scls")
CONTEXT = 120
EOS_EVERY = 11
TIME = PaddedLatency(
    prefill=Bilinear(product=1e-6, sequence=1e-5, length=1e-6, constant=1e-4),
    decode=Bilinear(product=1e-7, sequence=1e-5, length=1e-7, constant=1e-4),
)
MEMORY = MemoryByBytes(token_bytes=1, available_bytes=2000)


class FakeStatic:
    """The fake model of the engine's tests in padded batches; fails where a prompt holds ``poison``."""

    def __init__(self, eos_every: int = EOS_EVERY, poison: int | None = None) -> None:
        self.eos_every = eos_every
        self.poison = poison
        self.sizes: list[int] = []
        self.interrupted = threading.Event()

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        iterations: int,
        limits: Sequence[int],
        ends: Sequence[Collection[int]] | None = None,
    ) -> StaticResult:
        if any(self.poison in prompt for prompt in prompts):
            raise RuntimeError("out of memory")
        ends = [(EOS,)] * len(prompts) if ends is None else ends
        self.sizes.append(len(prompts))
        outputs: list[list[int]] = [[] for _ in prompts]
        open_rows, ran = set(range(len(prompts))), 0
        while ran < iterations and open_rows:
            ran += 1
            for row in sorted(open_rows):
                known = [*prompts[row], *outputs[row]]
                token = next_token(known, 1, SamplingParams(temperature=0), 0, self.eos_every)
                outputs[row].append(token)
                if token in ends[row] or len(outputs[row]) == limits[row]:
                    open_rows.discard(row)
        ended = [output[-1] in end for output, end in zip(outputs, ends, strict=True)]
        return StaticResult(outputs, ended, ran, 1000 * ran)

    def interrupt(self) -> None:
        self.interrupted.set()


def engine(
    preset: str = "scls",
    *,
    workers: int = 2,
    slice_tokens: int | None = 4,
    make=FakeStatic,
    predictor=None,
    memory=MEMORY,
    service=None,
) -> StaticEngine:
    options = StaticSetup(preset=preset, interval_s=None if preset in ("sls", "so") else 0.001).options()
    if options.slice_tokens:
        options = replace(options, slice_tokens=slice_tokens)
    limits = ServiceInfo(
        model="fake",
        context_tokens=CONTEXT,
        max_total_tokens=max_request_tokens(memory, CONTEXT),
        kv_tokens=2000,
        vocab_size=VOCAB,
        eos_token_ids=(EOS,),
    )
    info = EngineInfo(
        services={"chat": limits}, device="cpu", threads=1, block_size=1, merged_blocks=1, kv_bytes=1,
        weight_bytes=1,
    )  # fmt: skip
    return StaticEngine(
        service or Service(name="chat", model="fake"), options, make, info, workers=workers, time=TIME,
        memory=memory, predictor=predictor,
    )  # fmt: skip


def request(number: int, prompt: int = 5, limit: int = 20, arrival_ms: float = 0, **sampling) -> Request:
    params = SamplingParams(**({"temperature": 0.0, "max_tokens": limit} | sampling))
    tokens = [97 + (number * 7 + at * number) % 26 for at in range(prompt)]
    return Request(
        id=str(number), service="chat", prompt=tokens, sampling=params, arrival_ns=round(arrival_ms * 1e6)
    )


def run(made: StaticEngine, requests: Sequence[Request]):
    return made.run(requests, ByteTokenizer(), progress=False)


def check(requests: Sequence[Request], outcome) -> None:
    """Every output is that of the request alone, and the accounting adds up."""
    report = outcome.report
    assert len(outcome.completions) == len(requests)
    for asked, answer in zip(requests, outcome.completions, strict=True):
        tokens = expected_tokens(asked, asked.sampling.max_tokens, EOS_EVERY)
        assert answer.tokens == tuple(tokens)
        ended = tokens[-1] == EOS and not asked.sampling.ignore_eos
        assert answer.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
        assert answer.text == bytes(t for t in tokens if t < 256).decode()
        assert answer.record.output_tokens == len(tokens)
        assert answer.record.finish_ns > answer.record.arrival_ns
    assert (report.requests, report.finished, report.failed) == (len(requests), len(requests), 0)
    assert report.tokens.useful_tokens == sum(len(answer.tokens) for answer in outcome.completions)
    assert sum(report.slices.values()) == len(requests)
    rows = sum(number * count for number, count in report.slices.items())
    assert rows == 0 if not requests else report.mean_batch_size * report.batches == pytest.approx(rows)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("preset", STATIC_PRESETS)
def test_every_preset_gives_the_outputs_of_requests_alone(preset: str, workers: int) -> None:
    requests = [request(i, prompt=1 + (i * 13) % 40, limit=1 + (i * 5) % 30) for i in range(40)]
    outcome = run(engine(preset, workers=workers), requests)
    check(requests, outcome)
    assert len(outcome.report.worker_completion_s) == workers


@settings(max_examples=examples(25))
@given(
    shapes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 40), st.integers(0, 8)), max_size=25),
    preset=st.sampled_from(sorted(STATIC_PRESETS)),
    workers=st.integers(1, 3),
    slice_tokens=st.integers(1, 12),
)
def test_any_workload_is_answered_once(shapes, preset, workers, slice_tokens) -> None:
    requests = [request(i, prompt, limit, arrival) for i, (prompt, limit, arrival) in enumerate(shapes)]
    check(requests, run(engine(preset, workers=workers, slice_tokens=slice_tokens), requests))


def test_figures_of_a_run_by_hand() -> None:
    # Three requests without stop tokens: prompts 2, 5, 5; limits 3, 6, 9; slices of 4, one worker.
    requests = [request(i, p, n, ignore_eos=True) for i, (p, n) in enumerate([(2, 3), (5, 6), (5, 9)])]
    report = run(engine("so", workers=1), requests).report
    # Batches: {2, 5, 5} x 4, then {9, 9} x 4 (limits 2 and 5), then {13} x 1.
    assert report.batches == 3
    assert report.mean_batch_size == 2
    assert report.tokens.pad_tokens == 3
    assert report.tokens.useful_tokens == 3 + 6 + 9
    assert report.tokens.invalid_tokens == 1 + 2
    assert report.tokens.prefilled_tokens == 12 + 18 + 13
    assert report.tokens.recomputed_tokens == 18 + 13
    assert report.slices == {1: 1, 2: 1, 3: 1}
    assert report.early_return_ratio == 0
    assert report.requests_per_s == pytest.approx(3 / report.duration_s)
    assert report.tokens_per_s == pytest.approx(18 / report.duration_s)
    [completed] = report.worker_completion_s
    assert 0 < completed <= report.duration_s
    assert report.worker_completion_std_s == 0


def test_early_returns_are_counted() -> None:
    ends = request(0, 4, 30)
    length = len(expected_tokens(ends, 30, EOS_EVERY))
    assert 1 < length < 30
    report = run(engine("sls", workers=1), [ends]).report
    assert (report.batches, report.early_return_ratio) == (1, 1.0)
    assert report.tokens.invalid_tokens == 0
    longer = [ends, request(1, 4, length + 5, ignore_eos=True)]
    report = run(engine("sls", workers=1), longer).report
    assert (report.batches, report.tokens.invalid_tokens) == (1, 5)


def test_slices_let_the_short_go_and_sls_does_not() -> None:
    requests = [request(i, 4, 40 if i == 0 else 4, ignore_eos=True) for i in range(6)]
    whole, sliced = (run(engine(preset, workers=1), requests).report for preset in ("sls", "so"))
    assert whole.tokens.invalid_tokens == 5 * 36
    assert sliced.tokens.invalid_tokens == 0
    assert (whole.slices, sliced.slices) == ({1: 6}, {1: 5, 10: 1})


def test_a_failing_batch_fails_only_its_requests(caplog: pytest.LogCaptureFixture) -> None:
    requests = [request(i, 5, 12) for i in range(8)]
    poisoned = replace(requests[3], prompt=[*requests[3].prompt, 299])
    requests[3] = poisoned
    made = engine("so", workers=2, make=lambda: FakeStatic(poison=299))
    made._options = replace(made._options, max_batch=1)
    outcome = run(made, requests)
    failed = outcome.completions[3]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "worker 1 failed: RuntimeError: out of memory"
    assert failed.record is None
    assert (outcome.report.finished, outcome.report.failed) == (7, 1)
    for asked, answer in zip(requests, outcome.completions, strict=True):
        if asked is not poisoned:
            assert answer.tokens == tuple(expected_tokens(asked, 12, EOS_EVERY))


def test_if_all_workers_fail_all_requests_get_the_reason() -> None:
    requests = [request(i) for i in range(5)]
    outcome = run(engine("scls", make=lambda: FakeStatic(poison=requests[0].prompt[0])), requests[:1])
    assert [answer.finish_reason for answer in outcome.completions] == [FinishReason.ERROR]
    assert outcome.report.batches == 0
    assert outcome.report.to_json()["response_mean_s"] is None


def test_stop_strings_and_stop_tokens_end_a_request() -> None:
    plain = request(2, 6, 30, ignore_eos=True)
    tokens = expected_tokens(plain, 30)
    text = bytes(tokens).decode()
    with_string = replace(plain, id="s", sampling=replace(plain.sampling, stop=(text[6:9],)))
    with_token = replace(plain, id="t", sampling=replace(plain.sampling, stop_token_ids=(tokens[5],)))
    outcome = run(engine("so", workers=1), [with_string, with_token])
    cut, ended = outcome.completions
    assert cut.text == text[: text.index(text[6:9])]
    assert (cut.finish_reason, cut.stop_reason) == (FinishReason.STOP, text[6:9])
    first = tokens.index(tokens[5])
    assert ended.tokens == tuple(tokens[: first + 1])
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, tokens[5])
    assert outcome.report.tokens.useful_tokens == len(cut.tokens) + len(ended.tokens)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 1.0}, "temperature: static batches decode greedily"),
        ({"n": 2}, "n: static"),
        ({"logprobs": 1}, "logprobs: static"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: static"),
        ({"embed": True}, "embed: static"),
        ({"logit_bias": ((3, 1.0),)}, "logit_bias: static"),
        ({"allowed_token_ids": (3,)}, "allowed_token_ids: static"),
        ({"banned_sequences": ((3,),)}, "banned_sequences: static"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: static"),
        ({"min_tokens": 3}, "min_tokens: static"),
        ({"max_tokens": 500}, "ask for at most 115 tokens"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_runs(changes, words) -> None:
    made: list[FakeStatic] = []

    def make() -> FakeStatic:
        made.append(FakeStatic())
        return made[-1]

    with pytest.raises(InvalidRequest, match=words):
        run(engine(make=make), [request(0), request(1, **changes)])
    assert not any(executor.sizes for executor in made)


def test_without_a_limit_a_request_may_fill_what_is_left_of_the_context() -> None:
    outcome = run(engine("so"), [request(0, 100, max_tokens=None, ignore_eos=True)])
    assert len(outcome.completions[0].tokens) == CONTEXT - 100


def test_a_request_must_fit_in_the_memory_of_one_worker() -> None:
    small = MemoryByBytes(token_bytes=1, available_bytes=50, zeta=1.0)
    assert max_request_tokens(small, CONTEXT) == 50
    assert max_request_tokens(MemoryByRule(), CONTEXT) == CONTEXT
    assert max_request_tokens(MemoryByBytes(token_bytes=60, available_bytes=60), CONTEXT) == 0
    with pytest.raises(InvalidRequest, match="all that the KV memory can hold"):
        run(engine(memory=small), [request(0, 45, 6)])
    check(fits := [request(0, 44, 6)], run(engine(memory=small), fits))


def test_arrivals_wait_for_their_time() -> None:
    requests = [request(0, arrival_ms=30), request(1, arrival_ms=0), request(2, arrival_ms=15)]
    outcome = run(engine("sls"), requests)
    check(requests, outcome)
    for asked, answer in zip(requests, outcome.completions, strict=True):
        assert answer.record.arrival_ns == asked.arrival_ns < answer.record.first_token_ns


class Halving:
    """Believes in half the limit, and in one token more of whatever outgrew that."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.recorded: dict[str, int] = {}

    def predict(self, request: Request, generated: int, ceiling: int) -> int:
        self.asked.append((request.id, generated, ceiling))
        return max(1, ceiling // 2) if generated == 0 else generated + 1

    def record(self, request: Request, output_tokens: int) -> None:
        self.recorded[request.id] = output_tokens


def test_predictions_limit_batches_and_are_renewed_when_outgrown() -> None:
    predictor = Halving()
    asked = [request(0, 4, 8, ignore_eos=True)]
    outcome = run(engine("s3", workers=1, predictor=predictor), asked)
    # Believed 4; then one token more each time: batches of 4, 1, 1, 1, 1.
    assert outcome.report.slices == {5: 1}
    assert predictor.asked == [("0", 0, 8), ("0", 4, 8), ("0", 5, 8), ("0", 6, 8), ("0", 7, 8)]
    assert predictor.recorded == {"0": 8}
    check(asked, outcome)


def test_goals_reach_the_batch_former() -> None:
    service = Service(name="chat", model="fake", slo=SLO(e2e_s=9.0))
    made = engine("uellm", service=service)
    own = replace(request(0), slo=SLO(e2e_s=2.0))
    assert [made._open(r, 0, ByteTokenizer()).static_request.slo_s for r in (own, request(1))] == [2.0, 9.0]


def test_leaving_early_stops_the_workers() -> None:
    """A batch in the middle is ended, one that waits is dropped, and the threads are gone."""

    class Endless(FakeStatic):
        def run(self, prompts, iterations, limits, ends=None) -> StaticResult:
            started.set()
            self.interrupted.wait()
            return StaticResult([[1]], [False], 1, 1)

    started = threading.Event()
    work = BatchWork(0, [[1]], 9, [9], [()])
    workers = StaticWorkers([Endless()])

    def use() -> None:
        with workers:
            workers.submit(0, work)
            workers.submit(0, replace(work, number=1))
            started.wait()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use()
    assert not any(thread.is_alive() for thread in workers._threads)
    assert workers.next_done(0).number == 0
    assert workers.next_done(0) is None


def test_ids_must_differ() -> None:
    with pytest.raises(ValueError, match="different ids"):
        run(engine(), [request(1), request(1)])


def test_calibration_recovers_what_the_executor_takes() -> None:
    class Timed(FakeStatic):
        def run(self, prompts, iterations, limits, ends=None) -> StaticResult:
            seconds = TIME.serve(len(prompts), len(prompts[0]), iterations)
            return StaticResult(
                [[1]] * len(prompts), [False] * len(prompts), iterations, round(seconds * 1e9)
            )

    said: list[str] = []
    fitted = calibrate(Timed(), context_tokens=CONTEXT, progress=said.append)
    for shape in [(1, 8, 4), (4, 64, 4), (8, 100, 16)]:
        assert fitted.serve(*shape) == pytest.approx(TIME.serve(*shape), rel=0.02)
    assert said[-1] == "calibrating 4/4"


def test_the_setup_puts_its_numbers_in_place_of_the_preset_s() -> None:
    options = StaticSetup(preset="scls", slice_tokens=32, interval_s=0.5, max_batch=7).options()
    assert (options.slice_tokens, options.max_batch) == (32, 7)
    assert options.interval == AdaptiveInterval(0.5)
    assert StaticSetup(preset="sls").options() == static_preset("sls")
    with pytest.raises(ConfigError, match="no batching interval"):
        StaticSetup(preset="so", interval_s=1.0)
    with pytest.raises(ConfigError, match="scls"):
        StaticSetup(preset="slcs")
    with pytest.raises(ConfigError, match="workers must be at least 1"):
        StaticSetup(workers=0)
