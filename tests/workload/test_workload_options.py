"""Workload options become requests."""

from collections import Counter
from pathlib import Path

import pytest
import workload_builders as build

from shoal.core import ConfigError
from shoal.workload import (
    LENGTHS,
    AtOnce,
    FixedLength,
    Independent,
    Poisson,
    Replay,
    Uniform,
    WorkloadOptions,
    assign_clients,
    build_requests,
)

SMALL = Independent(FixedLength(8), FixedLength(2))


def test_lengths_and_arrivals_without_any_file() -> None:
    options = WorkloadOptions(
        lengths=LENGTHS["azure-conversation"], arrivals=Poisson(2.0), requests=40, seed=1
    )
    requests = build_requests(options, ["chat"])
    assert len(requests) == 40
    assert requests[0].arrival_ns == 0 < requests[-1].arrival_ns
    assert requests == build_requests(options, ["chat"])


@pytest.mark.parametrize("what", ["lengths", "arrivals", "services"])
def test_everything_depends_on_the_seed(what: str) -> None:
    def drawn(seed: int) -> list[object]:
        options = WorkloadOptions(lengths=LENGTHS["sharegpt"], arrivals=Poisson(2.0), requests=40, seed=seed)
        requests = build_requests(options, ["a", "b"])
        pick = {
            "lengths": lambda r: len(r.prompt),
            "arrivals": lambda r: r.arrival_ns,
            "services": lambda r: r.service,
        }
        return [pick[what](request) for request in requests]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_trace_as_it_is(tmp_path: Path) -> None:
    path = build.write(tmp_path, build.AZURE)
    requests = build_requests(WorkloadOptions(trace=path), ["chat"])
    assert [(len(r.prompt), r.true_output_tokens, r.arrival_ns) for r in requests] == [
        (374, 44, 0),
        (396, 109, 4_314_579_000),
    ]
    scaled = build_requests(WorkloadOptions(trace=path, time_scale=2.0, requests=2, max_tokens=50), ["chat"])
    assert scaled[1].arrival_ns == 8_629_158_000
    assert scaled[1].sampling.max_tokens == 50
    assert len(build_requests(WorkloadOptions(trace=path, requests=1), ["chat"])) == 1


def test_prefixes_are_hashed_for_the_engines_blocks(tmp_path: Path) -> None:
    options = WorkloadOptions(trace=build.write(tmp_path, build.MOONCAKE))
    first, second = build_requests(options, ["chat"], block_size=128)
    assert (len(first.prompt.block_hashes), len(second.prompt.block_hashes)) == (600 // 128, 513 // 128)
    assert first.prompt.block_hashes == second.prompt.block_hashes[:4]


def test_replay_at_a_wanted_rate(tmp_path: Path) -> None:
    options = WorkloadOptions(trace=build.write(tmp_path, build.AZURE), arrivals=Replay(rate=10.0))
    assert [r.arrival_ns for r in build_requests(options, ["chat"])] == [0, 100_000_000]


def test_lengths_of_a_table_with_drawn_times(tmp_path: Path) -> None:
    path = build.write(tmp_path, build.LENGTHS_TABLE)
    requests = build_requests(WorkloadOptions(trace=path, arrivals=Uniform(2.0)), ["chat"])
    assert [(len(r.prompt), r.arrival_ns) for r in requests] == [(10, 0), (30, 500_000_000)]
    with pytest.raises(ConfigError, match=r"nothing says when requests arrive.*poisson"):
        build_requests(WorkloadOptions(trace=path), ["chat"])
    with pytest.raises(ConfigError, match="nothing to replay"):
        build_requests(WorkloadOptions(trace=path, arrivals=Replay()), ["chat"])


def test_invocations_need_lengths(tmp_path: Path) -> None:
    path = build.write(tmp_path, build.COUNTS)
    with pytest.raises(ConfigError, match="has arrivals only; give lengths"):
        build_requests(WorkloadOptions(trace=path), ["a"])
    requests = build_requests(WorkloadOptions(trace=path, lengths=SMALL), ["a", "b"])
    assert Counter(r.service for r in requests) == {"a": 3, "b": 3}
    assert {len(r.prompt) for r in requests} == {8}


def test_a_closed_loop_needs_no_times(tmp_path: Path) -> None:
    options = WorkloadOptions(trace=build.write(tmp_path, build.AZURE), clients=1)
    assert [r.arrival_ns for r in build_requests(options, ["chat"])] == [0, 0]
    assert len(build_requests(WorkloadOptions(lengths=SMALL, requests=5, clients=2), ["chat"])) == 5


def test_functions_are_dealt_round_robin() -> None:
    assert assign_clients(["f", "g", "f", "h", "g"], ["a", "b"]) == {"f": "a", "g": "b", "h": "a"}


def test_clients_are_dealt_to_services(tmp_path: Path) -> None:
    options = WorkloadOptions(trace=build.write(tmp_path, build.TURNS), arrivals=AtOnce())
    assert [r.service for r in build_requests(options, ["a", "b"])] == ["a", "a", "b"]


def test_services_by_shares() -> None:
    options = WorkloadOptions(
        lengths=SMALL, arrivals=AtOnce(), requests=6000, services={"a": 3.0, "b": 1.0, "c": 0.0}
    )
    counts = Counter(r.service for r in build_requests(options, ["a", "b", "c"]))
    assert set(counts) == {"a", "b"}
    assert counts["a"] / 6000 == pytest.approx(0.75, abs=0.02)


CSV = """prompt_tokens,output_tokens,arrival_s,client,service
8,2,0,c,a
8,2,1,c,b
8,2,2,c,b
"""
LOG = """{"prompt_tokens": 8, "output_tokens": 2, "arrival_s": 0, "service": "a"}
{"prompt_tokens": 8, "output_tokens": 2, "arrival_s": 1, "service": "b"}
{"prompt_tokens": 8, "output_tokens": 2, "arrival_s": 2, "service": "b"}
"""


@pytest.mark.parametrize("text", [CSV, LOG])
def test_requests_go_to_the_services_that_a_trace_says(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace"
    trace.write_text(text)

    def services_of(*services: str, **options: object) -> list[str]:
        built = build_requests(WorkloadOptions(trace=trace, **options), services)
        return [request.service for request in built]

    assert services_of("a", "b", "c") == ["a", "b", "b"]
    assert services_of("a", "b", services={"a": 1.0}) == ["a", "a", "a"]
    for served in (["a", "c"], ["a"]):
        with pytest.raises(ConfigError, match="has requests of service b, but the services are a"):
            services_of(*served)
    trace.write_text(text.replace('"b"', '"a"').replace(",b", ",a"))
    assert services_of("other") == ["other"] * 3, "one service need not be called alike"


def test_shares_come_before_clients_and_equal_shares_where_there_are_neither(tmp_path: Path) -> None:
    options = WorkloadOptions(
        trace=build.write(tmp_path, build.TURNS), arrivals=AtOnce(), services={"b": 1.0}
    )
    assert {r.service for r in build_requests(options, ["a", "b"])} == {"b"}
    options = WorkloadOptions(lengths=SMALL, arrivals=AtOnce(), requests=4000)
    assert Counter(r.service for r in build_requests(options, ["a", "b"]))["a"] == pytest.approx(
        2000, abs=150
    )


def test_a_longer_workload_begins_as_a_shorter_one() -> None:
    def build_some(count: int) -> list[object]:
        options = WorkloadOptions(lengths=LENGTHS["sharegpt"], arrivals=Poisson(1.0), requests=count)
        return list(build_requests(options, ["a", "b"]))

    assert build_some(30)[:10] == build_some(10)


def test_empty_traces(tmp_path: Path) -> None:
    path = build.write(tmp_path, "")
    for options in (
        WorkloadOptions(trace=path),
        WorkloadOptions(trace=path, arrivals=Poisson(1.0), lengths=SMALL),
        WorkloadOptions(trace=path, arrivals=Replay(rate=2.0)),
    ):
        assert build_requests(options, ["a", "b"]) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({}, "needs a trace"),
        ({"lengths": SMALL}, "needs a trace"),
        ({"lengths": SMALL, "requests": 0}, "requests must be at least 1"),
        ({"lengths": SMALL, "requests": 1, "clients": 0}, "clients must be at least 1"),
        ({"lengths": SMALL, "requests": 1, "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"lengths": SMALL, "requests": 1, "time_scale": 0.0}, "time_scale must be more than 0"),
        ({"lengths": SMALL, "requests": 1, "services": {"a": 0.0}}, "at least one above 0"),
        ({"lengths": SMALL, "requests": 1, "services": {"a": -1.0, "b": 1.0}}, "services needs shares"),
    ],
)
def test_senseless_options_are_refused(wrong: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        WorkloadOptions(**wrong)  # type: ignore[arg-type]


def test_unknown_services_are_named() -> None:
    options = WorkloadOptions(lengths=SMALL, arrivals=AtOnce(), requests=1, services={"c": 1.0})
    with pytest.raises(ConfigError, match="no service c; there are a, b"):
        build_requests(options, ["a", "b"])
