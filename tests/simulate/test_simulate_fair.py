"""Fair shares between clients in simulation: a flood, and the clients of a real trace."""

import csv
from collections import defaultdict
from statistics import mean, median

import pytest

from at_hand import shared_folder
from shoal.core import Request
from shoal.forecast import RooflineTimes, device_spec, kv_tokens, model_spec
from shoal.measure import RunRecord
from shoal.schedule import Order, SchedulerOptions
from shoal.schedule.policies.orders import Fair, Fcfs
from shoal.simulate import EngineSpec, OpenLoop, ServiceSpec, Simulation, token_layout
from shoal.workload import TraceRow, to_requests


def simulated(requests: list[Request], order: Order) -> RunRecord:
    model, device = model_spec("llama-3.1-8b"), device_spec("a100-80")
    layout = token_layout(kv_tokens(model, device) // 16, 16)
    services = {"default": ServiceSpec(times=RooflineTimes(model, device), context_tokens=8192)}
    scheduler = SchedulerOptions(order=order, starvation_s=1e6, max_running=64)
    return Simulation(
        [EngineSpec(services=services, layout=layout, scheduler=scheduler)], OpenLoop(requests)
    ).run()


def ttfts_by_client(requests: list[Request], order: Order) -> dict[str, list[float]]:
    clients = {request.id: request.client.name for request in requests if request.client is not None}
    found = defaultdict(list)
    for row in simulated(requests, order).requests:
        found[clients[row.request_id]].append(row.ttft_s)
    return found


def test_a_steady_client_does_not_wait_behind_a_flood() -> None:
    flood = [TraceRow(number * 10_000_000, 200, 200, "flood") for number in range(700)]
    steady = [TraceRow(number * 500_000_000, 200, 200, "steady") for number in range(14)]
    requests = to_requests([*flood, *steady], "default")
    fair, fcfs = ttfts_by_client(requests, Fair()), ttfts_by_client(requests, Fcfs())
    assert mean(fcfs["steady"]) > 2
    assert mean(fair["steady"]) < mean(fcfs["steady"]) / 4
    assert mean(fair["flood"]) < 1.1 * mean(fcfs["flood"])


@pytest.mark.slow
def test_light_clients_of_a_trace_hardly_wait_under_overload() -> None:
    """Half of the clients ask for little; what they wait under overload is what the others make them wait."""
    arena = shared_folder("traces") / "vtc_arena/arena_multiclient_trace.csv"
    with arena.open() as file:
        rows = [
            TraceRow(
                round(float(row["arrival_s"]) * 1e9),
                int(row["prompt_len"]),
                int(row["output_len"]),
                row["client"],
            )
            for row in csv.DictReader(file)
        ]
    requests = to_requests(rows, "default", time_scale=0.1)
    tokens: dict[str, int] = defaultdict(int)
    for row in rows:
        assert row.client is not None
        tokens[row.client] += row.prompt_tokens + 2 * row.output_tokens
    light = sorted(tokens, key=lambda client: tokens[client])[: len(tokens) // 2]
    fair, fcfs = ttfts_by_client(requests, Fair()), ttfts_by_client(requests, Fcfs())
    waits = {
        name: median(mean(ttfts[client]) for client in light)
        for name, ttfts in (("fair", fair), ("fcfs", fcfs))
    }
    assert waits["fcfs"] > 2
    assert waits["fair"] < waits["fcfs"] / 2
