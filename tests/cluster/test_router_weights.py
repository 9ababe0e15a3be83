"""The router with engines that hold the weights of one of their services at a time."""

import pytest
from engine_builders import FAKE_WEIGHT_BYTES
from fake_cluster import FakeBackend
from test_router import PROMPT, expected, greedy, play, tokens_of

from shoal.cluster.router.router import Router
from shoal.core import ServiceUnavailable
from shoal.schedule import WeightsOptions
from shoal.schedule.policies.residency import Place, ResidencyDecision, Swap


class Eager:
    """Swaps whenever it may: the absent weights come."""

    def decide(self, view, now_ns):
        wanted = [each for each in view.weights.values() if each.num_requests and each.place is Place.ABSENT]
        return ResidencyDecision([Swap(each.name, list(view.weights)) for each in wanted])


def play_with_two_services(scenario, **options):
    weights = WeightsOptions(memory_bytes=FAKE_WEIGHT_BYTES, policy=Eager(), quantum_s=0.1)
    play(scenario, models=("fake", "fake"), weights=weights, **options)


def let_fetches_fail(backend: FakeBackend, *engines: str) -> None:
    for engine in engines:
        backend.processes[engine].core.fake_executor.failing_fetches = 10**6


def fetches(backend: FakeBackend) -> list[int]:
    """By engine."""
    return [process.core.fake_executor.fetches for process in backend.processes.values()]


def test_requests_go_where_their_weights_are():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        for service in "abbbaab":
            stream = await router.submit(service, PROMPT, greedy())
            assert await tokens_of(stream) == expected(PROMPT)
        assert fetches(backend) == [2, 1], "one engine has the weights of b since the first request for them"

    play_with_two_services(scenario)


def test_a_request_goes_on_where_its_weights_can_be_loaded(caplog):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        let_fetches_fail(backend, "0")
        streams = [await router.submit("b", PROMPT, greedy(n=2)) for _ in range(3)]
        for stream in streams:
            deltas = [delta async for delta in stream]
            for choice in (0, 1):
                tokens = [token for delta in deltas if delta.choice == choice for token in delta.tokens]
                assert len(tokens) == 60
        assert router.unfinished == router.waiting == 0

    play_with_two_services(scenario)
    assert "cannot go on at engine 0: its weights cannot be loaded (the disk is gone)" in caplog.text


def test_a_stream_goes_on_from_where_it_was():
    async def scenario(router: Router, backend: FakeBackend) -> None:
        stream = await router.submit("b", PROMPT, greedy())
        begin = list((await anext(aiter(stream))).tokens)
        assert len(begin) < 60
        let_fetches_fail(backend, "0")
        others = [await router.submit("a", PROMPT, greedy()) for _ in range(6)]
        assert begin + await tokens_of(stream) == expected(PROMPT)
        for other in others:
            assert await tokens_of(other) == expected(PROMPT)
        assert fetches(backend)[0] > 3

    play_with_two_services(scenario)


@pytest.mark.parametrize("engines", [1, 2])
def test_the_client_gets_an_error_where_no_engine_can_load_the_weights(engines):
    async def scenario(router: Router, backend: FakeBackend) -> None:
        let_fetches_fail(backend, *backend.processes)
        stream = await router.submit("b", PROMPT, greedy())
        with pytest.raises(ServiceUnavailable, match="'b' cannot be served now: its weights"):
            await tokens_of(stream)
        assert router.unfinished == 0

    play_with_two_services(scenario, engines=engines)
