"""Plans: the cheapest fleet that is enough, and the plans of the fleets that were tried."""

import json
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import httpx
import numpy as np
import pytest

from at_hand import free_port
from shoal.config.scenario import Scenario
from shoal.config.scenario_file import load_scenario
from shoal.config.settings import load_config
from shoal.core import ConfigError
from shoal.place.placement import Placement
from shoal.plan.capacity import FleetPlan, _Planner, plan
from shoal.plan.catalog import load_catalogue
from shoal.plan.demand import Demand, Policies, build_demand
from shoal.plan.deployment import server_settings
from shoal.plan.fleet import Fleet, cost, within
from shoal.plan.goals import PlanningOptions
from shoal.plan.outcomes import Outcomes
from shoal.plan.trial import Part
from shoal.serve.options import ServerOptions
from shoal.simulate.parallel import Workers

GPUS = "devices: [{name: a100-80, price: 1.8, most: 2}, {name: l40s, price: 0.9, most: 3}]\n"
CPUS = "devices: [{name: cpu, price: 0.1, most: 2, memory: 1GiB, threads: 1}]\n"
CHAT = """\
services: [{name: chat, model: llama-3.1-8b, slo: {ttft: 1s, tpot: 60ms}}]
workload: {lengths: {prompt: 300, output: 60}, rate: 14, requests: 500}
"""
SMALL = """\
services: [{name: chat, model: smollm2, slo: {ttft: 5s}}, {name: more, model: smollm2, slo: {ttft: 5s}}]
workload: {lengths: {prompt: 20, output: 10}, rate: 1, requests: 400}
"""


def demand_of(folder: Path, devices: str, scenario: str) -> tuple[Demand, Scenario]:
    (folder / "devices.yaml").write_text(devices)
    (folder / "scenario.yaml").write_text(scenario)
    loaded = load_scenario(file=folder / "scenario.yaml")
    return build_demand(loaded, load_catalogue(folder / "devices.yaml")), loaded


def test_a_goal_for_the_largest_gap_bounds_the_time_of_every_token(tmp_path: Path) -> None:
    def goal_s(slo: str) -> float:
        demand, _ = demand_of(tmp_path, GPUS, CHAT.replace("{ttft: 1s, tpot: 60ms}", slo))
        return demand.screen(demand.traffic(Part(0, 300))).loads["chat"].goal_s

    both = "{ttft: 1s, tpot: 60ms, mtpot: 1s}"
    assert goal_s("{ttft: 1s, mtpot: 60ms}") == goal_s("{ttft: 1s, tpot: 60ms}") == goal_s(both)
    assert goal_s("{mtpot: 60ms}") > 60 * 0.06


def test_the_cheapest_fleet_that_is_enough_is_chosen_and_more_devices_never_attain_less(
    tmp_path: Path,
) -> None:
    demand, _ = demand_of(tmp_path, GPUS, CHAT)
    tried: list[FleetPlan] = []
    found = plan(demand, PlanningOptions(attainment=0.9, trials=3, processes=1), on_fleet=tried.append)
    assert {each.fleet for each in tried} == set(found.fleets)
    assert not found.stopped
    assert found.chosen is not None
    enough = [each for each in found.fleets.values() if each.attainment >= 0.9]
    assert found.chosen.plan.cost == min(each.cost for each in enough)
    for (less, worse), (more, better) in permutations(found.fleets.items(), 2):
        if within(less, more):
            assert better.attainment >= worse.attainment
    costs = [each.cost for each in found.frontier]
    attainments = [each.attainment for each in found.frontier]
    assert costs == sorted(costs)
    assert attainments == sorted(set(attainments))
    chosen = found.chosen.plan.fleet
    assert all(sum(each.plan.fleet) == sum(chosen) - 1 for each in found.one_less)
    assert found.planned.stop == found.held_out.start == 300


@pytest.mark.slow
def test_other_policies_are_tried_where_a_cheaper_fleet_nearly_is_enough(tmp_path: Path) -> None:
    scenario = CHAT.replace("rate: 14", "rate: 8") + "scheduler: {max_running: 4}\n"
    demand, loaded = demand_of(tmp_path, GPUS.replace("most: 3", "most: 1"), scenario)
    plain = plan(demand, PlanningOptions(attainment=0.75, trials=1, processes=1))
    tuned = plan(demand, PlanningOptions(attainment=0.75, trials=4, processes=1))
    assert not any(each.tuned for each in plain.fleets.values())
    assert any(each.tuned for each in tuned.fleets.values())
    for fleet, each in tuned.fleets.items():
        if fleet in plain.fleets:
            assert each.attainment >= plain.fleets[fleet].attainment
        assert each.tuned or each.policies.scheduler == loaded.scheduler


LARGE = """\
services:
  - {name: chat, model: qwen2.5-14b, slo: {ttft: 20s}}
  - {name: more, model: llama-2-13b, slo: {ttft: 20s}}
workload: {lengths: {prompt: 300, output: 60}, rate: 0.3, requests: 400}
"""


def test_a_service_that_does_not_fit_misses_its_goals(tmp_path: Path) -> None:
    demand, _ = demand_of(tmp_path, "devices: [{name: l40s, price: 0.9, most: 2}]\n", LARGE)
    found = plan(demand, PlanningOptions(trials=1, processes=1))
    assert found.fleets[1,].attainment == 0
    assert found.chosen is not None
    assert found.chosen.plan.fleet == (2,)
    assert [later.attainment.mean for later in found.one_less] == [0]


@pytest.mark.slow
def test_with_a_limit_on_weights_fewer_devices_are_enough(tmp_path: Path) -> None:
    """Of two models one is in memory at a time, and requests wait for the other."""
    devices = "devices: [{name: l40s, price: 0.9, most: 2}]\n"
    scenario = LARGE.replace("rate: 0.3", "rate: 0.1") + "weights: {memory: 29GiB}\n"
    demand, loaded = demand_of(tmp_path, devices, scenario)
    found = plan(demand, PlanningOptions(trials=4, processes=1))
    assert found.chosen is not None
    assert found.chosen.plan.fleet == (1,)
    placement = found.chosen.plan.placement
    [engine] = demand.engines.engines(placement.groups[0].shape)
    assert engine.weights.memory_bytes == 29 << 30
    assert engine.fetch_times.seconds.keys() == {
        "qwen2.5-14b with 2.0 bytes each",
        "llama-2-13b with 2.0 bytes each",
    }
    settings = server_settings(demand, loaded, placement, found.chosen.plan.policies)
    assert settings["weights"] == {"memory": "29GiB"}


def test_pinned_services_need_their_part_of_the_limit(tmp_path: Path) -> None:
    pinned = LARGE.replace("{ttft: 20s}}", "{ttft: 20s}, starvation: 3s, pin: true}", 1)
    demand, loaded = demand_of(tmp_path, GPUS, pinned + "weights: {memory: 29GiB}\n")
    fits = [demand.engines.memory.fits(["chat", "more"], kind.memory, 1) for kind in demand.catalogue.devices]
    assert fits == [False, False], "qwen2.5-14b and llama-2-13b take 51.8 GiB"
    device, other, *_ = demand.cluster((2, 0)).devices
    placement = Placement.sharing([([device], ["chat"]), ([other], ["more"])])
    settings = server_settings(demand, loaded, placement, Policies(loaded.scheduler, "max-min"))
    assert [service.get("pin") for service in settings["services"]] == [True, None]
    assert [service.get("starvation") for service in settings["services"]] == ["3s", None]
    [engine] = demand.engines.engines(placement.groups[0].shape)
    assert engine.services["chat"].starvation_s == 3


def test_the_bandwidth_of_weights_must_be_known(tmp_path: Path) -> None:
    own = "devices: [{name: own, memory: 40GiB, latency: {roofline: {device: a100-40}}}]\n"
    limit = "weights: {memory: 29GiB}\n"
    with pytest.raises(ConfigError, match="how fast weights come to devices of kind own"):
        demand_of(tmp_path, own, LARGE + limit)
    demand, loaded = demand_of(tmp_path, own, LARGE + "weights: {memory: 29GiB, bandwidth: 5GB}\n")
    assert demand.engines.fetch_bytes_per_s == {"own": 5e9}
    placement = Placement.sharing([(demand.cluster((1,)).devices, ["chat", "more"])])
    settings = server_settings(demand, loaded, placement, Policies(loaded.scheduler, "max-min"))
    assert settings["weights"] == {"memory": "29GiB"}, "the bandwidth is that of the simulated device"


def test_models_of_one_shape_have_weights_of_their_own(tmp_path: Path) -> None:
    tuned = LARGE.replace("llama-2-13b", "qwen2.5-14b-tuned")
    demand, _ = demand_of(tmp_path, GPUS, tuned)
    memory = demand.engines.memory
    assert len(memory.weight_bytes(["chat", "more"], 1)) == 2
    demand, _ = demand_of(tmp_path, GPUS, LARGE.replace("llama-2-13b", "qwen2.5-14b"))
    assert len(demand.engines.memory.weight_bytes(["chat", "more"], 1)) == 1


def test_a_service_without_requests_is_rejected(tmp_path: Path) -> None:
    scenario = LARGE.replace("requests: 400", "requests: 400, services: {chat: 1, more: 0}")
    demand, _ = demand_of(tmp_path, GPUS, scenario)
    with pytest.raises(ConfigError, match="service more has none of the 240 requests"):
        plan(demand, PlanningOptions(trials=1, processes=1))


class Noisy(_Planner):
    """A planner whose searches find placements of these attainments."""

    found: dict[Fleet, float]

    def _place_fleet(self, fleet: Fleet) -> FleetPlan:
        found = np.array([self.found.get(fleet, 0.0)])
        return FleetPlan(
            fleet=fleet,
            cost=cost(self._demand.stock, fleet),
            placement=Placement(()),
            policies=self._default,
            outcomes=Outcomes(["chat"], met=found, latency=found, ttft_s=found),
        )


def test_a_fleet_that_proves_enough_is_taken_though_a_larger_one_seemed_short(tmp_path: Path) -> None:
    """The placement found for (0, 2) is better than that for (1, 2), by chance."""
    demand, _ = demand_of(tmp_path, GPUS, CHAT)
    wanted = PlanningOptions(attainment=0.9, trials=1, processes=1)
    with Workers(demand, 1) as workers:
        planner = Noisy(demand, wanted, workers)
        planner.found = {(2, 0): 0.95, (0, 3): 0.5, (1, 3): 0.95, (1, 2): 0.95, (0, 2): 0.5, (1, 1): 0.95}
        assert planner._search() == (1, 1)


def test_of_fleets_of_one_price_the_one_that_attains_most_is_taken(tmp_path: Path) -> None:
    """Two of the cheap ones cost what one of the others does, and fewer devices alone save nothing."""
    demand, _ = demand_of(tmp_path, GPUS, CHAT)
    with Workers(demand, 1) as workers:
        planner = Noisy(demand, PlanningOptions(attainment=0.9, trials=1, processes=1), workers)
        planner.found = {(1, 0): 0.91, (0, 2): 0.97, (0, 3): 0.98, (2, 0): 0.99}
        assert {planner._best(fleet).cost for fleet in ((1, 0), (0, 2))} == {1.8}
        assert planner._best_at_cost((1, 0)) == (0, 2)


def test_kinds_say_how_many_devices_an_engine_may_span_and_how_fast_they_are(tmp_path: Path) -> None:
    text = (
        "devices: [{name: own, price: 1, memory: 40GiB, span: 4, latency: {roofline: {device: a100-40}}}]\n"
    )
    demand, scenario = demand_of(tmp_path, text, CHAT.replace("8b", "70b"))
    [kind] = demand.catalogue.devices
    times = [demand.engines.times("chat", "own", tp).decode_times(1, 100, 1)[0] for tp in (4, 8)]
    assert times[0] > times[1]
    assert {device.host for device in demand.cluster((8,)).devices} == {"own-host-0", "own-host-1"}
    assert kind.engine is None, "nothing says"
    placement = Placement.sharing([(demand.cluster((4,)).devices, ["chat"])])
    policies = Policies(demand.engines.scheduler, "max-min")
    with pytest.raises(ConfigError, match="engines that span several devices"):
        server_settings(demand, scenario, placement, policies)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "shoal.cli", *words]


@pytest.mark.slow
def test_a_plan_for_cpus_serves(tmp_path: Path) -> None:
    (tmp_path / "devices.yaml").write_text(CPUS)
    (tmp_path / "scenario.yaml").write_text(SMALL)
    out = tmp_path / "shoal.yaml"
    planning = command("plan", "--devices", str(tmp_path / "devices.yaml"), "--trials", "1")
    planning += ["--config", str(tmp_path / "scenario.yaml"), "--out", str(out)]
    subprocess.run(planning, check=True, timeout=200)
    options = load_config(ServerOptions, file=out)
    assert [service.name for service in options.services] == ["chat", "more"]
    assert all((device.device, device.threads) == ("cpu", 1) for device in options.devices)
    port = free_port()
    serving = command("serve", "--config", str(out), "--port", str(port))
    server = subprocess.Popen(serving, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 120
        while True:
            assert server.poll() is None
            assert time.monotonic() < deadline_s
            try:
                if httpx.get(f"{url}/health/ready?service=more").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        for service in ("chat", "more"):
            asked = {"model": service, "prompt": "Water boils at", "max_tokens": 4}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.text)["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        server.wait(60)
