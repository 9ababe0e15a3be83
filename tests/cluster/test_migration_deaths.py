"""Engines in processes of their own that die at each stage of a migration: their streams notice nothing."""

import asyncio
import io
from pathlib import Path

import pytest
from dying_engine import BUILDER, BY_TOKENS, DESTINATION, MORTAL, SOURCE
from engine_builders import ByteTokenizer, expected_tokens, make_options, make_request

from routers import QUICK
from shoal.cluster.backends.make import make_backend
from shoal.cluster.manager.actions import ClusterAction, MigrationEnded
from shoal.cluster.manager.event_log import EventLogWriter, replay
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.options import EnginePlan
from shoal.cluster.router.router import Router
from shoal.cluster.status import EngineState
from shoal.core import SamplingParams

PROMPT = [97, 98, 99, 100, 101]
TOKENS = 150
MODEL = "fake?step_ms=5"
ABORTED_BY = {"Export", "read_blocks", "Reserve", "write_blocks", "Commit", "join", "submit"}
"""Deaths after which the request is not at the destination; after others it is, or may be."""
CASES = [
    *((method, stage) for method in ("live", "stop") for stage in (*SOURCE, *DESTINATION)),
    *(("tokens", stage) for stage in BY_TOKENS),
]
QUICKLY = {("live", "Stopped"), ("live", "write_blocks")}


@pytest.mark.parametrize(
    ("method", "stage"),
    [pytest.param(*case, marks=() if case in QUICKLY else pytest.mark.slow) for case in CASES],
)
def test_a_death_during_a_migration_changes_no_stream(method, stage, tmp_path):
    decided: list[ClusterAction] = []
    asyncio.run(move_and_die(MigrationMethod(method), stage, tmp_path / "reached", decided))
    # Later ones fill the engine that has come back.
    ended = next(action for action in decided if isinstance(action, MigrationEnded))
    assert ended.method == method
    if stage != "Stopped":
        assert ended.outcome == ("aborted" if stage in ABORTED_BY else "done")


async def move_and_die(
    method: MigrationMethod, stage: str, reached: Path, decided: list[ClusterAction]
) -> None:
    """Run two streams on engine 0 or 1 each, and move the first, which is on 0, to 1."""
    dies = 1 if stage in DESTINATION or stage == "submit" else 0
    plans = [
        EnginePlan(
            name=str(number),
            options=make_options(
                f"{MODEL}#{stage},{reached}", blocks=640, threads=MORTAL if number == dies else 1
            ),
        )
        for number in range(2)
    ]
    log = io.BytesIO()
    writer = EventLogWriter(log, QUICK)

    def note(now_ns, event, actions) -> None:
        writer.write(now_ns, event, actions)
        decided.extend(actions)

    router = Router(
        plans,
        {},
        {"a": ByteTokenizer()},
        make_backend(QUICK),
        QUICK,
        max_queue=64,
        builder=BUILDER,
        on_decision=note,
    )
    await router.run()
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS)
        streams = [await router.submit("a", PROMPT, sampling) for _ in range(2)]
        owners = [router._calls.get(stream.id).engine for stream in streams]
        moved = streams[owners.index("0")]
        outputs: dict[str, list[int]] = {stream.id: [] for stream in streams}

        async def read(stream) -> None:
            async for delta in stream:
                outputs[stream.id] += delta.tokens
                if stream is moved and len(outputs[stream.id]) == 20:
                    router.administration.migrate_request(moved.id, "1", method)

        await asyncio.wait_for(asyncio.gather(*map(read, streams)), 60)
        expected = expected_tokens(make_request(prompt=PROMPT, max_tokens=TOKENS), TOKENS)
        assert all(output == expected for output in outputs.values())
        while any(engine.state is not EngineState.READY for engine in router.engines):
            await asyncio.sleep(0.02)
        assert [engine.restarts for engine in router.engines] == [1 - dies, dies]
        assert all(engine.leases == engine.requests == 0 for engine in router.engines)
        for engine in router.engines:
            assert (await router.stats(engine.name)).pool.live_bytes == 0
    finally:
        await router.close()
    replay(log.getvalue().splitlines(keepends=True))
