"""A placement that follows the load, with engines and searches in processes of their own."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from engine_builders import BUILDER, ByteTokenizer, expected_tokens, make_options, make_request
from test_router_processes import PROMPT, greedy, read

from routers import QUICK, start_router
from shoal.cluster.placing.options import PlacementOptions
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.router.router import Router

PLACEMENT = PlacementOptions(policy="search", interval_s=1.0, min_interval_s=0.5, hysteresis=False)
FOLLOWS = replace(QUICK, placement=PLACEMENT)


async def answered(router: Router, service: str, number: int) -> None:
    """One request, of a prompt and a length of its own, is answered right."""
    prompt = [97 + number % 20, *PROMPT * (1 + number % 5)]
    limit = 10 + number % 10
    stream = await router.submit(service, prompt, greedy(max_tokens=limit))
    tokens = [token for delta in await read(stream) for token in delta.tokens]
    assert tokens == expected_tokens(make_request("r", prompt, max_tokens=limit), limit)


async def serve_on_one_of_two() -> tuple[PlacingStatus, dict[str, set[str]]]:
    """Serve from one engine until the policy has changed that, with step times that it learned."""
    options = make_options("fake?step_ms=4", "fake?step_ms=4", blocks=400)
    folders = dict.fromkeys("ab", Path("somewhere"))
    tokenizers = {name: ByteTokenizer() for name in "ab"}
    router = await start_router(options, folders, tokenizers, BUILDER, engines=2, cluster=FOLLOWS)
    try:
        for service in "ab":
            await router.administration.set_engines(service, ["0"])
        running, number = [], 0
        while not router.placing.learned or router.placing.changes["done"] < 3:
            running.append(asyncio.create_task(answered(router, "aab"[number % 3], number)))
            number += 1
            await asyncio.sleep(0.02)
        await asyncio.gather(*running)
        return router.placing, {engine.name: set(engine.placed) for engine in router.engines}
    finally:
        await router.close()


@pytest.mark.slow
def test_a_search_changes_the_placement_and_no_answer():
    status, placed = asyncio.run(asyncio.wait_for(serve_on_one_of_two(), 300))
    assert placed["1"]
    assert set().union(*placed.values()) == {"a", "b"}
    assert status.searches["failed"] == 0
    assert status.learned > 0
