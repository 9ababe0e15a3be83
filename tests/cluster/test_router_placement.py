"""A router whose placement follows the load: in virtual time, with searches whose results are known."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fake_cluster import FakeBackend
from test_router import PROMPT, QUICK, expected, greedy, play, tokens_of

from shoal.cluster.placing.options import PlacementOptions
from shoal.cluster.placing.search_process import SearchFailed
from shoal.cluster.placing.search_task import SearchResult, SearchTask
from shoal.cluster.router.router import Router
from shoal.core import ConfigError
from shoal.place.estimate import Estimate, ServiceEstimate
from shoal.schedule import WeightsOptions

FOLLOWS = replace(QUICK, placement=PlacementOptions(policy="search", interval_s=30, min_interval_s=10))


def estimate(met: float) -> Estimate:
    return Estimate({"a": ServiceEstimate(100, 100 * (1 - met), 100, 100.0)})


class Scripted:
    """A search that finds one placement, and remembers its tasks."""

    def __init__(self, placement: Mapping[str, str], gain: float = 0.5) -> None:
        self.placement = {engine: frozenset(services) for engine, services in placement.items()}
        self.gain = gain
        self.tasks: list[SearchTask] = []
        self.fails = 0

    async def __call__(self, task: SearchTask) -> SearchResult:
        self.tasks.append(task)
        await asyncio.sleep(2.0)
        if self.fails:
            self.fails -= 1
            raise SearchFailed("its process ended; see the log")
        return SearchResult(
            placement=self.placement,
            estimate=estimate(0.4 + self.gain),
            present=estimate(0.4),
            execution_s=dict.fromkeys(task.services, 0.5),
            load_bytes=0,
            learned=frozenset(),
            took_s=2.0,
            ended_early=False,
        )


def placed(router: Router) -> dict[str, str]:
    return {engine.name: "".join(sorted(engine.placed)) for engine in router.engines}


async def serve_until(router: Router, at_s: float, service: str = "a") -> None:
    """A request every half second, each answered right, up to a time."""
    loop = asyncio.get_running_loop()
    streams = []
    while loop.time() < at_s:
        streams.append(await router.submit(service, PROMPT, greedy()))
        await asyncio.sleep(0.5)
    for stream in streams:
        assert await tokens_of(stream) == expected(PROMPT)


def follow(scenario, search: Scripted, *, cluster=FOLLOWS, models=("fake", "fake"), **options) -> None:
    play(scenario, search=search, cluster=cluster, models=models, blocks=640, **options)


@pytest.mark.parametrize("limit", [None, 10**9])
def test_the_placement_follows_what_a_search_finds(caplog, limit):
    caplog.set_level("INFO", "shoal")
    search = Scripted({"0": "a", "1": "b"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        assert placed(router) == {"0": "ab", "1": "ab"}
        assert router.placing.decision is None
        await serve_until(router, 40.0)
        assert placed(router) == {"0": "a", "1": "b"}
        assert {
            engine.name: set(backend.processes[engine.name].info.services) for engine in router.engines
        } == ({"0": {"a"}, "1": {"b"}} if limit is None else {"0": set("ab"), "1": set("ab")})
        status = router.placing
        assert (status.outcome, status.changes, status.searches) == (
            "done",
            {"done": 1, "abandoned": 0},
            {"done": 1, "failed": 0},
        )
        assert status.facts is not None
        assert status.facts.services["a"].arrived == len(search.tasks[0].requests) > 20
        await serve_until(router, 45.0)
        await serve_until(router, 50.0, "b")

    follow(scenario, search, weights=WeightsOptions(memory_bytes=limit))
    assert "placement: -b on 0, -a on 1 (goals met 40.0% -> 90.0%" in caplog.text
    assert "the next interval has 30 s" in caplog.text


def test_a_search_gets_the_traffic_the_engines_and_their_steps():
    search = Scripted({"0": "ab", "1": "ab"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await serve_until(router, 40.0)
        [task] = search.tasks
        assert [engine.name for engine in task.engines] == ["0", "1"]
        assert len({engine.kind for engine in task.engines}) == 1
        assert task.present == {"0": frozenset("ab"), "1": frozenset("ab")}
        assert set(task.services) == {"a", "b"}
        assert task.services["a"].kv_token_bytes > 0
        answered = [each for each in task.requests if each.output_tokens == 60]
        assert len(answered) > 20
        assert {(each.service, each.prompt_tokens) for each in task.requests} == {("a", len(PROMPT))}
        assert task.window_s == pytest.approx(30, abs=3)
        [(service, _)] = task.steps
        assert service == "a"
        assert any(step.decodes > 1 for step in next(iter(task.steps.values())))

    follow(scenario, search)


def test_a_small_gain_changes_nothing(caplog):
    caplog.set_level("INFO", "shoal")
    search = Scripted({"0": "a", "1": "b"}, gain=0.01)

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await serve_until(router, 40.0)
        assert placed(router) == {"0": "ab", "1": "ab"}
        assert router.placing.decision is not None
        assert not router.placing.decision.changes

    follow(scenario, search)
    assert "placement: stays as it is (too little gain" in caplog.text


def test_few_requests_and_failed_searches_change_nothing():
    search = Scripted({"0": "a", "1": "b"})
    search.fails = 1

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await serve_until(router, 5.0)
        await asyncio.sleep(30.0)
        assert router.placing.decision is not None
        assert "requests came, fewer than 20" in router.placing.decision.why
        assert search.tasks == []
        await serve_until(router, 68.0)
        assert router.placing.decision.why == "the search failed: its process ended; see the log"
        assert placed(router) == {"0": "ab", "1": "ab"}
        assert router.placing.searches == {"done": 0, "failed": 1}
        await serve_until(router, 100.0)
        assert placed(router) == {"0": "a", "1": "b"}

    follow(scenario, search)


def test_an_engine_that_dies_gives_its_services_to_others():
    search = Scripted({"1": "ab"})
    slow = replace(FOLLOWS, restart=replace(FOLLOWS.restart, first_s=300.0, max_s=300.0))

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.set_engines("a", ["0"])
        await router.administration.set_engines("b", ["1"])
        serving = asyncio.create_task(serve_until(router, 40.0, "b"))
        await asyncio.sleep(20.0)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        await serving
        # One engine alone is not searched for.
        assert search.tasks == []
        assert router.placing.decision is not None
        assert router.placing.decision.why == "there are no two ready engines to choose from"

    follow(scenario, search, cluster=slow)


def test_a_third_engine_takes_over_from_one_that_died():
    search = Scripted({"1": "ab", "2": "b"})
    slow = replace(FOLLOWS, restart=replace(FOLLOWS.restart, first_s=300.0, max_s=300.0))

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.set_engines("a", ["0"])
        await router.administration.set_engines("b", ["1", "2"])
        serving = asyncio.create_task(serve_until(router, 40.0, "b"))
        await asyncio.sleep(20.0)
        backend.die(backend.processes["0"], "killed by signal 9 (SIGKILL)")
        late = await router.submit("a", PROMPT, greedy())
        await serving
        assert [engine.name for engine in search.tasks[0].engines] == ["1", "2"]
        assert placed(router) == {"0": "a", "1": "ab", "2": "b"}
        assert await tokens_of(late) == expected(PROMPT)

    follow(scenario, search, cluster=slow, engines=3)


def test_operators_place_services():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        change = router.administration.set_engines
        running = [await router.submit("a", PROMPT, greedy(max_tokens=100)) for _ in range(6)]
        await change("a", ["1"])
        assert placed(router) == {"0": "b", "1": "ab"}
        await change("a", ["0"])
        await change("b", ["0", "1"])
        assert placed(router) == {"0": "ab", "1": "b"}
        for stream in running:
            assert await tokens_of(stream) == expected(PROMPT, 100)
        assert router.placing.changes == {"done": 3, "abandoned": 0}
        with pytest.raises(ConfigError, match="no service 'c'; there are: a, b"):
            await change("c", ["0"])
        with pytest.raises(ConfigError, match="no engine '7'; there are: 0, 1"):
            await change("a", ["7"])
        with pytest.raises(ConfigError, match="'a' needs at least one engine"):
            await change("a", [])
        await router.administration.unload_service("a")
        with pytest.raises(ConfigError, match="'a' is unloaded; load it before"):
            await change("a", ["1"])

    follow(scenario, Scripted({}), cluster=QUICK)


@pytest.mark.slow
def test_an_engine_that_cannot_load_a_service_is_not_asked_again():
    search = Scripted({"0": "ab", "1": "b"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.set_engines("a", ["1"])
        backend.processes["0"].core.fake_services.fails = True
        await serve_until(router, 36.0, "b")
        assert router.placing.outcome == "engine 0 cannot load a"
        assert placed(router) == {"0": "b", "1": "ab"}
        await serve_until(router, 70.0, "b")
        allowed = {engine.name: engine.services for engine in search.tasks[-1].engines}
        assert allowed == {"0": frozenset("b"), "1": frozenset("ab")}
        with pytest.raises(ConfigError, match="'a' is not placed as asked for: engine 0 cannot load a"):
            await router.administration.set_engines("a", ["0"])
        backend.processes["0"].core.fake_services.fails = False
        await router.administration.set_engines("a", ["0"])
        assert placed(router)["0"] == "ab"

    follow(scenario, search)


@pytest.mark.slow
def test_a_fixed_placement_is_not_searched():
    search = Scripted({"0": "a", "1": "b"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await serve_until(router, 130.0)
        assert placed(router) == {"0": "ab", "1": "ab"}
        assert (router.placing.policy, router.placing.facts) == ("fixed", None)

    follow(scenario, search, cluster=QUICK)
    assert search.tasks == []


@pytest.mark.parametrize("cluster", [QUICK, FOLLOWS])
def test_an_operator_asks_for_a_search(cluster):
    search = Scripted({"0": "a", "1": "b"}, gain=0.0)

    async def scenario(router: Router, backend: FakeBackend) -> None:
        propose = router.administration.propose_placement
        await serve_until(router, 5.0)
        with pytest.raises(ConfigError, match=r"proposed: [0-9]+ requests came, fewer than 20"):
            await propose(apply=False)
        await serve_until(router, 15.0)
        kept = await propose(apply=True)
        assert (kept.steps, kept.why.partition(":")[0]) == ([], "too little gain")
        search.gain = 0.5
        planned = await propose(apply=False)
        assert [str(step) for step in planned.steps] == ["-b on 0", "-a on 1"]
        assert len(planned.facts.requests) == len(search.tasks[-1].requests) >= 20
        assert placed(router) == {"0": "ab", "1": "ab"}
        applied = await propose(apply=True)
        assert router.placing.proposal is applied
        assert placed(router) == {"0": "a", "1": "b"}
        assert router.placing.changes == {"done": 1, "abandoned": 0}
        again = await propose(apply=True)
        assert (again.steps, again.why) == ([], "the present placement is best")
        search.fails = 1
        with pytest.raises(ConfigError, match="be proposed: the search failed: its process ended"):
            await propose(apply=True)

    follow(scenario, search, cluster=cluster)


def test_a_search_is_for_the_last_interval_while_few_requests_have_come_since():
    search = Scripted({"0": "ab", "1": "ab"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await serve_until(router, 64.0)
        proposal = await router.administration.propose_placement(apply=False)
        assert proposal.facts.length_s == pytest.approx(60)
        await serve_until(router, 80.0)
        proposal = await router.administration.propose_placement(apply=False)
        assert 16 < proposal.facts.length_s < 25

    follow(scenario, search, cluster=QUICK)


def test_what_is_proposed_may_fail():
    search = Scripted({"0": "ab", "1": "b"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.set_engines("a", ["1"])
        backend.processes["0"].core.fake_services.fails = True
        await serve_until(router, 15.0, "b")
        with pytest.raises(ConfigError, match="not changed as proposed: engine 0 cannot load a"):
            await router.administration.propose_placement(apply=True)
        assert placed(router) == {"0": "b", "1": "ab"}

    follow(scenario, search, cluster=QUICK)


def test_the_interval_of_a_fixed_placement_goes_on_while_few_requests_come():
    search = Scripted({"0": "ab", "1": "ab"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await asyncio.sleep(55.0)
        await serve_until(router, 64.0)
        with pytest.raises(ConfigError, match="requests came, fewer than 20"):
            await router.administration.propose_placement(apply=False)
        await serve_until(router, 75.0)
        proposal = await router.administration.propose_placement(apply=False)
        assert 70 < proposal.facts.length_s < 80

    follow(scenario, search, cluster=QUICK)


def test_a_service_that_is_removed_during_the_search_does_not_undo_the_rest():
    search = Scripted({"0": "a", "1": "ab"})

    async def scenario(router: Router, backend: FakeBackend) -> None:
        await router.administration.set_engines("a", ["1"])
        await serve_until(router, 15.0, "b")
        proposing = asyncio.create_task(router.administration.propose_placement(apply=True))
        await asyncio.sleep(1.0)
        await router.administration.remove_service("b")
        proposal = await proposing
        assert [str(step) for step in proposal.steps] == ["+a on 0"]
        assert placed(router) == {"0": "a", "1": "a"}

    follow(scenario, search, cluster=QUICK)
