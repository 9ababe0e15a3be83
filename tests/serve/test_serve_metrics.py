"""The /metrics page."""

import asyncio
from dataclasses import asdict, fields, replace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_builders import FakeEngine, chat, completion, make_app, make_client, until
from weights_status import engine_with_weights

import shoal
from shoal.cluster.manager.actions import MigrationOutcome
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.status import EngineState, EngineStatus, ServiceStatus
from shoal.config.api_keys import ApiKey
from shoal.core import SLO, FinishReason, RequestRecord, Service, ServiceUnavailable, TokenDeadlines
from shoal.engine.info import EngineInfo
from shoal.engine.stats import EngineStats, PoolStats, ServiceStats, StepTotals
from shoal.forecast import Accuracy, Spread, Traffic
from shoal.frontend.reader import ChoiceReader
from shoal.kvcache import PoolUsage, ServiceUsage
from shoal.schedule import Observed, SchedulerStats
from shoal.schedule import ServiceStats as ScheduledStats
from shoal.schedule.policies.residency import Place
from shoal.serve.metrics.server_metrics import ServerMetrics

TRAFFIC = Traffic(
    finished=8,
    prompt_tokens=Spread(100, 10),
    output_tokens=Spread(30, 3),
    execution_s=Spread(4, 0.5),
    arrivals_per_s=1.5,
    latency_s=6.0,
    ttft_s=0.75,
    attainment=0.9,
)

ENGINE = ("engine", "0")
BUSY = FakeEngine().engines[0]
SERVER_WIDE = ("shoal_build", "shoal_connections", "shoal_http", "shoal_inter_token", "shoal_placement",
               "shoal_request_", "shoal_requests_finished", "shoal_requests_re", "shoal_requests_without",
               "shoal_service", "shoal_slo", "shoal_wanted_engines")  # fmt: skip


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape_after(*requests, engine=None):
    async def main():
        async with make_client(make_app(engine)) as client:
            for path, body in requests:
                await client.post(path, json=body)
            response = await client.get("/metrics")
            assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
            return samples(response.text)

    return asyncio.run(main())


def test_engine_counters_and_gauges():
    values = scrape_after()
    chat_service = ("service", "chat")
    assert values["shoal_engine_up", ENGINE] == 1
    assert values["shoal_requests_running", ENGINE, chat_service] == 2
    assert values["shoal_preemptions_total", ENGINE, chat_service] == 3
    assert values["shoal_preemptions_total", ENGINE, ("service", "base")] == 0
    assert values["shoal_requests_swapped", ENGINE, chat_service] == 4
    assert values["shoal_swapped_tokens_total", ENGINE, chat_service] == 60
    assert values["shoal_compacted_blocks_total", ENGINE, chat_service] == 5
    assert values["shoal_prompt_tokens_total", ENGINE, chat_service] == 40
    assert values["shoal_output_tokens_total", ENGINE, chat_service] == 50
    assert values["shoal_kv_bytes", ENGINE, ("use", "total")] == 1000
    assert values["shoal_kv_bytes", ENGINE, ("use", "cached")] == 100
    assert values["shoal_kv_bytes", ENGINE, ("use", "unfilled")] == 15
    assert values["shoal_kv_utilisation", ENGINE] == 0.25
    assert values["shoal_steps_total", ENGINE] == 7


def test_every_engine_has_its_own_samples_and_there_is_no_sum():
    other = EngineStatus(
        name="b",
        state=EngineState.LOADING,
        services=("chat",),
        device="cpu",
        restarts=5,
        leases=2,
        migrations={
            (MigrationMethod.LIVE, MigrationOutcome.DONE): 7,
            (MigrationMethod.LIVE, MigrationOutcome.ABORTED): 1,
        },
    )
    dead = replace(FakeEngine().engines[0], name="c", state=EngineState.WAITING, heartbeat_age_s=99)
    values = scrape_after(engine=FakeEngine(others=(other, dead)))

    def by_engine(name, *labels):
        return {dict(rest)["engine"]: value for (found, *rest), value in values.items()
                if found == name and set(labels) <= set(rest)}  # fmt: skip

    assert by_engine("shoal_engine_up") == {"0": 1, "b": 0, "c": 0}
    assert by_engine("shoal_engine_standby") == {"0": 0, "b": 0, "c": 0}
    assert by_engine("shoal_engine_restarts_total") == {"0": 2, "b": 5, "c": 2}
    assert by_engine("shoal_request_leases") == {"0": 0, "b": 2, "c": 0}
    assert by_engine("shoal_migrations_total", ("method", "live"), ("outcome", "done")) == {
        "0": 0,
        "b": 7,
        "c": 0,
    }
    assert by_engine("shoal_engine_heartbeat_age_seconds") == {"0": 0.25, "c": 99}
    assert by_engine("shoal_engine_state_age_seconds") == {"0": 0.5, "c": 0.5}
    # Counters of a dead engine stay, its gauges disappear, and an engine without a report has no samples.
    assert by_engine("shoal_preemptions_total", ("service", "chat")) == {"0": 3, "c": 3}
    assert by_engine("shoal_requests_running", ("service", "chat")) == {"0": 2}
    assert by_engine("shoal_kv_bytes", ("use", "total")) == {"0": 1000}
    assert by_engine("shoal_engine_cpu_seconds_total") == {"0": 12.5, "c": 12.5}
    assert by_engine("shoal_engine_memory_bytes") == {"0": 3 << 30}
    assert by_engine("shoal_gpu_utilisation") == {"0": 0.5}
    assert by_engine("shoal_gpu_memory_bytes") == {"0": 9 << 30}
    assert by_engine("shoal_gpu_power_watts") == {"0": 300.0}
    of_engines = [
        name for name, *labels in values
        if name.startswith("shoal_") and "engine" not in dict(labels) and not name.startswith(SERVER_WIDE)
    ]  # fmt: skip
    assert not of_engines


def test_weights_are_those_that_are_loaded():
    states = {"0": EngineState.READY, "b": EngineState.DRAINING, "c": EngineState.WAITING}
    facts = dict.fromkeys(("threads", "block_size", "merged_blocks", "kv_bytes"), 1)
    engines = [
        EngineStatus(
            name=name,
            state=state,
            services=("chat",),
            device="cpu",
            info=EngineInfo(services={}, device="cpu", weight_bytes=5000, **facts),
        )
        for name, state in states.items()
    ]
    values = samples(ServerMetrics([]).render(engines, {}, 0).decode())
    found = {
        dict(labels)["engine"]: v for (name, *labels), v in values.items() if name == "shoal_weight_bytes"
    }
    assert found == {"0": 5000, "b": 5000}


def test_weights_that_come_and_go():
    limited = engine_with_weights("0", {"chat": Place.RESIDENT, "base": Place.ABSENT}, budget=1000)
    dead = replace(limited, name="dead", state=EngineState.WAITING)
    unlimited = engine_with_weights("all", {"chat": Place.RESIDENT}, budget=None)
    page = samples(ServerMetrics([]).render([limited, dead, unlimited], {}, 0).decode())
    values = {key: value for key, value in page.items() if key[0].startswith("shoal_weight")}
    chat, base = ("service", "chat"), ("service", "base")
    for engine in (ENGINE, ("engine", "dead")):
        for service in (chat, base):
            assert values.pop(("shoal_weight_fetches_total", engine, service)) == 3
            assert values.pop(("shoal_weight_evictions_total", engine, service)) == 2
            assert values.pop(("shoal_weight_fetch_seconds_total", engine, service)) == 1.5
            assert values.pop(("shoal_weight_waits_total", engine, service)) == 4
            assert values.pop(("shoal_weight_wait_seconds_total", engine, service)) == 6
    for place in ("resident", "coming", "absent"):
        assert values.pop(("shoal_weight_place", ENGINE, ("place", place), chat)) == (place == "resident")
        assert values.pop(("shoal_weight_place", ENGINE, ("place", place), base)) == (place == "absent")
    assert values == {
        ("shoal_weight_bytes", ENGINE): 600,
        ("shoal_weight_memory_bytes", ENGINE): 1000,
        ("shoal_weight_bytes", ("engine", "all")): 5000,
    }


def test_requests_without_an_engine_are_shown_by_service():
    services = {"chat": ServiceStatus(ready=1, wanted=3, waiting=4, loading=2, resumed=12)}
    values = samples(ServerMetrics([]).render((), services, 0).decode())
    chat_service = ("service", "chat")
    assert values["shoal_service_engines", chat_service, ("state", "ready")] == 1
    assert values["shoal_service_engines", chat_service, ("state", "wanted")] == 3
    assert values["shoal_service_engines", chat_service, ("state", "loading")] == 2
    assert values["shoal_requests_without_engine", chat_service] == 4
    assert values["shoal_requests_resumed_total", chat_service] == 12
    assert ("shoal_batches_total", chat_service) not in values
    services = {"chat": replace(services["chat"], batches=3, batched_requests=20)}
    values = samples(ServerMetrics([]).render((), services, 0).decode())
    assert values["shoal_batches_total", chat_service] == 3
    assert values["shoal_batched_requests_total", chat_service] == 20


def test_requests_without_an_engine_are_refused_and_started_streams_fail():
    late, begun = (
        FakeEngine(fail_after=after, failure=ServiceUnavailable("none", retry_after_s=1)) for after in (0, 2)
    )
    asked = ("/v1/completions", completion(stream=True, n=2))
    refused = ("shoal_requests_refused_total", ("reason", "no_engine"), ("service", "base"))
    failed = ("shoal_requests_finished_total", ("reason", "error"), ("service", "base"))
    values = scrape_after(asked, engine=late)
    assert (values[refused], values.get(failed, 0)) == (2, 0)
    values = scrape_after(asked, engine=begun)
    assert (values[refused], values[failed]) == (0, 2)


def test_every_count_of_the_scheduler_reaches_the_engine_s_counts():
    names = [field.name for field in fields(ScheduledStats)]
    counted = ScheduledStats(**{name: number for number, name in enumerate(names, start=1)})
    used = ServiceUsage(
        live_blocks=101, cached_blocks=102, free_blocks=103, merged_blocks=104, block_bytes=32, token_bytes=2
    )
    usage = PoolUsage(capacity=9, free_merged=1, services={"a": used}, total_bytes=900, live_bytes=300)
    observed = {"a": Observed(traffic=TRAFFIC)}
    stats = EngineStats.collect(
        SchedulerStats({"a": counted}, steps=7), observed, usage, StepTotals(), block_size=16
    )
    assert stats.services["a"].observed is observed["a"]
    found = asdict(replace(stats.services["a"], observed=None))
    assert {name: found.pop(name) for name in names} == asdict(counted)
    blocks = {"live_blocks": 101, "cached_blocks": 102, "free_blocks": 103, "merged_blocks": 104}
    assert found == blocks | {"block_bytes": 32, "observed": None}


def observed_metrics(**observed):
    """The samples that a page has only if a service was ``observed``."""
    page = {}
    for key, seen in (("without", None), ("with", Observed(**observed))):
        pool = dict.fromkeys((field.name for field in fields(PoolStats)), 1)
        services = {"a": ServiceStats(observed=seen)}
        stats = EngineStats(services=services, pool=PoolStats(**pool), steps=StepTotals())
        page[key] = samples(ServerMetrics([]).render([replace(BUSY, stats=stats)], {}, 0).decode())
    return {
        (name, *(value for key, value in labels if key not in ("engine", "service"))): value
        for (name, *labels), value in page["with"].items()
        if (name, *labels) not in page["without"]
    }


def test_observed_statistics_are_shown():
    assert observed_metrics(traffic=TRAFFIC, accuracy=Accuracy(6, 5, 8), corrections=3) == {
        ("shoal_arrival_rate",): 1.5,
        ("shoal_execution_seconds", "mean"): 4,
        ("shoal_execution_seconds", "deviation"): 0.5,
        ("shoal_length_prediction_accuracy",): 0.75,
        ("shoal_length_prediction_majority",): 0.625,
        ("shoal_length_corrections_total",): 3,
    }


def test_unobserved_statistics_have_no_sample():
    nothing = Traffic(
        finished=0,
        prompt_tokens=None,
        output_tokens=None,
        execution_s=Spread(1, 0),
        arrivals_per_s=0,
        latency_s=None,
        ttft_s=None,
        attainment=None,
    )
    always = {
        ("shoal_arrival_rate",): 0,
        ("shoal_execution_seconds", "mean"): 1,
        ("shoal_execution_seconds", "deviation"): 0,
    }
    assert observed_metrics(traffic=nothing) == always
    learning = observed_metrics(traffic=nothing, accuracy=Accuracy(0, 0, 0), corrections=0)
    assert learning == always | {("shoal_length_corrections_total",): 0}


def test_every_choice_is_counted_once_by_service_and_reason():
    values = scrape_after(
        ("/v1/completions", completion(n=2, max_tokens=3)),
        ("/v1/completions", completion(prompt=["a", "b"], stream=True)),
        ("/v1/chat/completions", chat()),
        ("/v1/chat/completions", chat(max_tokens=-1)),
    )
    finished = {
        (dict(labels)["service"], dict(labels)["reason"]): value
        for (name, *labels), value in values.items()
        if name == "shoal_requests_finished_total"
    }
    assert finished == {("base", "length"): 2, ("base", "stop"): 2, ("chat", "stop"): 1}
    for name in ("ttft", "e2e", "tpot"):
        assert values[f"shoal_request_{name}_seconds_count", ("service", "base")] == 4
        assert values[f"shoal_request_{name}_seconds_count", ("service", "chat")] == 1


def test_failed_requests_count_as_errors_and_have_no_latency():
    values = scrape_after(("/v1/completions", completion()), engine=FakeEngine(error_after=1))
    assert values["shoal_requests_finished_total", ("reason", "error"), ("service", "base")] == 1
    assert values["shoal_request_e2e_seconds_count", ("service", "base")] == 0


def test_an_invalid_request_is_no_error():
    engine = FakeEngine(error_after=1, error_finish=FinishReason.INVALID)
    values = scrape_after(("/v1/chat/completions", chat()), engine=engine)
    assert values["shoal_requests_finished_total", ("reason", "invalid"), ("service", "chat")] == 1
    assert ("shoal_requests_finished_total", ("reason", "error"), ("service", "chat")) not in values
    assert values["shoal_slo_requests_total", ("outcome", "missed"), ("service", "chat")] == 0


def test_refused_requests_count_by_reason():
    async def main():
        engine = FakeEngine(max_queue=2, hold=asyncio.Event())
        async with make_client(make_app(engine)) as client:
            waiting = asyncio.create_task(client.post("/v1/completions", json=completion()))
            await until(lambda: engine.waiting == 1)
            for body in (completion(n=2), completion(prompt=["a", "b"]), completion(max_tokens=10_000)):
                await client.post("/v1/completions", json=body)
            engine.hold.set()
            await waiting
            engine.die()
            await client.post("/v1/chat/completions", json=chat())
            return samples((await client.get("/metrics")).text)

    refused = {
        (dict(labels)["service"], dict(labels)["reason"]): value
        for (name, *labels), value in asyncio.run(main()).items()
        if name == "shoal_requests_refused_total"
    }
    assert refused == {
        ("base", "queue_full"): 4,
        ("base", "goals_out_of_reach"): 0,
        ("base", "no_engine"): 0,
        ("base", "engine_died"): 0,
        ("chat", "queue_full"): 0,
        ("chat", "goals_out_of_reach"): 0,
        ("chat", "no_engine"): 1,
        ("chat", "engine_died"): 0,
    }


def test_latencies_come_from_the_record():
    metrics = ServerMetrics([Service(name="base", model="m", execution_s=2)])
    record = RequestRecord(
        request_id="r",
        service="base",
        arrival_ns=10**9,
        first_token_ns=3 * 10**9,
        finish_ns=8 * 10**9,
        prompt_tokens=4,
        output_tokens=11,
    )
    metrics.count_finished(FinishReason.STOP, record, SLO(), 0.5)
    values = samples(metrics.render((), {}, 0).decode())
    base = ("service", "base")
    assert values["shoal_request_ttft_seconds_sum", base] == pytest.approx(2)
    assert values["shoal_request_tpot_seconds_sum", base] == pytest.approx(0.5)
    assert values["shoal_request_e2e_seconds_sum", base] == pytest.approx(7)
    assert values["shoal_request_queue_seconds_sum", base] == pytest.approx(0.5)
    assert values["shoal_request_prefill_seconds_sum", base] == pytest.approx(1.5)
    assert values["shoal_request_decode_seconds_sum", base] == pytest.approx(5)
    assert values["shoal_request_prompt_tokens_sum", base] == 4
    assert values["shoal_request_output_tokens_sum", base] == 11
    assert values["shoal_request_normalised_latency_sum", base] == pytest.approx(3.5)
    assert values["shoal_request_normalised_latency_bucket", ("le", "3.0"), base] == 0
    assert values["shoal_request_normalised_latency_bucket", ("le", "5.0"), base] == 1


def goals_counted(values):
    return {
        (dict(labels)["service"], dict(labels)["outcome"]): value
        for (name, *labels), value in values.items()
        if name == "shoal_slo_requests_total"
    }


NEVER, ALWAYS = {"e2e": 1e-9}, {"e2e": 600, "ttft": 600, "tpot": 600, "mtpot": 600}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", chat(), {("chat", "met"): 1, ("chat", "missed"): 0}),
        ("/v1/chat/completions", chat(slo=NEVER), {("chat", "met"): 0, ("chat", "missed"): 1}),
        ("/v1/chat/completions", chat(slo={"ttft": 1e-9}), {("chat", "met"): 0, ("chat", "missed"): 1}),
        ("/v1/chat/completions", chat(slo={"mtpot": 1e-9}), {("chat", "met"): 0, ("chat", "missed"): 1}),
        ("/v1/chat/completions", chat(slo={"e2e_scale": 1e-9}), {("chat", "met"): 0, ("chat", "missed"): 1}),
        ("/v1/chat/completions", chat(slo={}, stream=True), {("chat", "met"): 1, ("chat", "missed"): 0}),
        ("/v1/completions", completion(), {("chat", "met"): 0, ("chat", "missed"): 0}),
        (
            "/v1/completions",
            completion(slo=NEVER, n=2, stream=True),
            {("chat", "met"): 0, ("chat", "missed"): 0, ("base", "missed"): 2},
        ),
        (
            "/v1/completions",
            completion(slo=ALWAYS, prompt=["a", "b"]),
            {("chat", "met"): 0, ("chat", "missed"): 0, ("base", "met"): 2},
        ),
    ],
)
def test_the_goals_of_a_request_override_those_of_its_service(path, body, expected):
    assert goals_counted(scrape_after((path, body))) == expected


def tokens_counted(values, service):
    """(on time, late)"""
    return tuple(
        values.get(("shoal_slo_tokens_total", ("outcome", outcome), ("service", service)))
        for outcome in ("on_time", "late")
    )


def test_tokens_count_by_their_deadlines():
    soon = {"ttft": 1e-9, "tpot": 1e-9}
    values = scrape_after(
        ("/v1/completions", completion(slo=ALWAYS, n=2)),
        ("/v1/completions", completion(slo=soon, stream=True)),
    )
    on_time, late = tokens_counted(values, "base")
    assert on_time == 2 * late > 0
    assert on_time + late == values["shoal_request_output_tokens_sum", ("service", "base")]


def test_tokens_have_deadlines_with_goals_for_the_first_and_the_others():
    values = scrape_after(("/v1/completions", completion(slo={"ttft": 600, "e2e": 600})))
    assert tokens_counted(values, "base") == (None, None)
    metrics = ServerMetrics([Service(name="base", model="m", slo=SLO(ttft_s=1, tpot_s=2))])
    assert tokens_counted(samples(metrics.render((), {}, 0).decode()), "base") == (0, 0)
    assert metrics.token_deadlines("base", SLO(tpot_s=3), 5) == TokenDeadlines(5, 1, 3)


def test_a_request_that_fails_has_missed_its_goals():
    failing = FakeEngine(error_after=1)
    values = scrape_after(
        ("/v1/completions", completion(slo=ALWAYS)), ("/v1/completions", completion()), engine=failing
    )
    assert goals_counted(values)["base", "missed"] == 1
    assert values["shoal_requests_finished_total", ("reason", "error"), ("service", "base")] == 2


def test_a_cancelled_request_counts_for_no_goal():
    metrics = ServerMetrics([Service(name="base", model="m", slo=SLO(ttft_s=1))])
    metrics.count_unfinished("base", FinishReason.CANCELLED, SLO())
    values = samples(metrics.render((), {}, 0).decode())
    assert values["shoal_requests_finished_total", ("reason", "cancelled"), ("service", "base")] == 1
    assert goals_counted(values) == {("base", "met"): 0, ("base", "missed"): 0}


def test_only_services_with_an_execution_time_have_a_normalised_latency():
    values = scrape_after(("/v1/completions", completion()), ("/v1/chat/completions", chat()))
    counts = {
        dict(labels)["service"]: value
        for (name, *labels), value in values.items()
        if name == "shoal_request_normalised_latency_count"
    }
    assert counts == {"chat": 1}


def test_inter_token_latencies_are_one_fewer_than_the_tokens():
    values = scrape_after(
        ("/v1/completions", completion(n=2, max_tokens=3)),
        ("/v1/completions", completion(max_tokens=6, stream=True)),
        ("/v1/completions", completion(max_tokens=1)),
    )
    # Unread deltas are joined, so there may be fewer.
    assert 2 <= values["shoal_inter_token_seconds_count", ("service", "base")] <= 2 + 2 + 5
    assert values["shoal_inter_token_seconds_count", ("service", "chat")] == 0
    assert values["shoal_request_output_tokens_sum", ("service", "base")] == 3 + 3 + 6 + 1


def test_the_engines_queue_time_is_used(monkeypatch):
    read = ChoiceReader.read

    def read_queued(reader, event, now_ns):
        return read(reader, event._replace(queue_ns=7 * 10**8), now_ns)

    monkeypatch.setattr(ChoiceReader, "read", read_queued)
    values = scrape_after(("/v1/completions", completion(n=2)))
    base = ("service", "base")
    assert values["shoal_request_queue_seconds_sum", base] == pytest.approx(1.4)
    assert values["shoal_request_prefill_seconds_sum", base] >= 0


def http_counts(*requests, **options):
    """Counts of the requests (method, path, body)."""

    async def main():
        async with make_client(make_app(**options)) as client:
            for method, path, body in requests:
                await client.request(method, path, json=body)
            return samples((await client.get("/metrics")).text)

    return {
        tuple(dict(labels)[name] for name in ("route", "method", "status")): value
        for (name, *labels), value in asyncio.run(main()).items()
        if name == "shoal_http_requests_total"
    }


def test_every_answer_is_counted_by_route_method_and_status():
    completions = "/v1/completions"
    assert http_counts(
        ("POST", completions, completion()),
        ("POST", completions, completion(stream=True)),
        ("POST", completions, completion(n=-1)),
        ("POST", completions, completion(model="gpt")),
        ("GET", completions, None),
        ("GET", "/v1/models/gpt", None),
        ("GET", "/v1/models/chat", None),
        ("HEAD", "/health", None),
        *(("GET", f"/secret-{number}", None) for number in range(20)),
        *((f"M{number}", "/health", None) for number in range(20)),
    ) == {
        (completions, "POST", "200"): 2,
        (completions, "POST", "400"): 1,
        (completions, "POST", "404"): 1,
        (completions, "GET", "405"): 1,
        ("/v1/models/{model_id}", "GET", "404"): 1,
        ("/v1/models/{model_id}", "GET", "200"): 1,
        ("/health", "HEAD", "200"): 1,
        ("other", "GET", "404"): 20,
        ("/health", "other", "405"): 20,
    }


def test_responses_of_middleware_are_counted_too():
    key = ApiKey(key="k", requests_per_minute=1)
    counts = http_counts(("POST", "/v1/completions", completion()), ("GET", "/x", None), api_keys=(key,))
    assert counts == {("/v1/completions", "POST", "401"): 1, ("other", "GET", "401"): 1}


def test_build_info():
    build = [labels for name, *labels in scrape_after() if name == "shoal_build_info"]
    assert build == [[("device", "cpu"), ("kernels", "torch only"), ("version", shoal.__version__)]]


def test_vllm_s_names_have_the_same_values():
    requests = (completion(n=2, max_tokens=3), completion(stream=True))
    engine = FakeEngine(others=(replace(BUSY, name="c"),))

    async def main():
        async with make_client(make_app(engine, vllm_metrics=True)) as client:
            for body in requests:
                await client.post("/v1/completions", json=body)
            return samples((await client.get("/metrics")).text)

    values = asyncio.run(main())

    def vllm(name, **labels):
        return values[f"vllm:{name}", *sorted({"engine": "0", "model_name": "base", **labels}.items())]

    assert vllm("num_requests_running", engine="c", model_name="chat") == 2
    assert vllm("kv_cache_usage_perc", engine="c", model_name="chat") == 0.25

    base = ("service", "base")
    assert vllm("time_to_first_token_seconds_sum") == values["shoal_request_ttft_seconds_sum", base]
    assert vllm("e2e_request_latency_seconds_bucket", le="+Inf") == 3
    assert vllm("request_success_total", finished_reason="length") == 2
    assert vllm("request_success_total", finished_reason="stop") == 1
    assert vllm("num_requests_running", model_name="chat") == 2
    assert vllm("num_preemptions_total", model_name="chat") == 3
    assert vllm("prompt_tokens_total", model_name="chat") == 40
    assert vllm("prefix_cache_queries_total", model_name="chat") == 40
    assert vllm("generation_tokens_total", model_name="chat") == 50
    assert vllm("kv_cache_usage_perc") == vllm("kv_cache_usage_perc", model_name="chat") == 0.25
    for name in (
        "inter_token_latency_seconds_count",
        "request_queue_time_seconds_count",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
        "num_requests_waiting",
        "prefix_cache_hits_total",
    ):
        assert vllm(name) >= 0
    assert not any(name.startswith("vllm:") for name, *_ in scrape_after())
