"""The simulator against a second one that shares nothing with it but the page on policies."""

from collections.abc import Sequence
from random import Random

import pytest
from plain_simulator import Engine, Job
from simulate_builders import make_request, make_spec

from shoal.core import StepPlan
from shoal.forecast import FittedTimes, LatencyModel
from shoal.schedule import Aggressive
from shoal.simulate import OpenLoop, Simulation

STEP_NS = 10_000_000
TIMES = FittedTimes(
    LatencyModel(constant_s=STEP_NS / 1e9, sequence_s=0.0, token_s=0.0, context_s=0.0, work_s=0.0)
)


def scenario(seed: int) -> tuple[Engine, list[Job]]:
    """A small pool and some requests, each of which fits in it."""
    random = Random(seed)
    blocks, block_size = random.randint(6, 40), random.choice((1, 4, 16))
    most_tokens = random.choice((8, 32, 64))
    engine = Engine(
        blocks=blocks,
        block_size=block_size,
        step_ns=STEP_NS,
        most_tokens=most_tokens,
        most_running=random.choice((1, 2, 5, most_tokens)),
        watermark=random.choice((1.0, 1.0, 0.75, 0.5)),
    )
    jobs = []
    arrival = 0
    apart = random.choice((0, 3 * 10**6, 3 * 10**7, 3 * 10**8))
    for number in range(random.randint(1, 25)):
        arrival += random.randint(0, apart)
        total = random.randint(2, blocks * block_size)
        output = random.randint(1, min(total - 1, 60))
        jobs.append(Job(f"r{number}", (arrival, number), total - output, output))
    return engine, jobs


def simulate(
    engine: Engine, jobs: Sequence[Job]
) -> tuple[list[tuple[int, tuple[int, ...]]], dict[str, tuple[int, ...]]]:
    """Steps of the simulator as the other one has them, and (first token, finish, preemptions) by request."""
    steps = []

    def note(number: int, plan: StepPlan, made_ns: int, steps_ns: Sequence[int]) -> None:
        if plan.seq_ids:
            steps.append((made_ns, tuple(sorted(plan.new_tokens))))
            assert list(steps_ns) == [STEP_NS]

    spec = make_spec(
        engine.blocks,
        block_size=engine.block_size,
        times=TIMES,
        prefix_caching=False,
        admission=Aggressive(watermark=engine.watermark),
        max_running=engine.most_running,
        max_batched_tokens=engine.most_tokens,
    )
    requests = [
        make_request(number, job.prompt, job.output, at_s=at_ns / 1e9, max_tokens=job.output)
        for job in jobs
        for at_ns, number in [job.place]
    ]
    record = Simulation([spec], OpenLoop(requests), on_plan=note).run()
    assert all(row.answered for row in record.requests)
    return steps, {
        row.request_id: (row.first_token_ns, row.finish_ns, row.preemptions) for row in record.requests
    }


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(50, 400, 50))])
def test_steps_preemptions_and_finish_times_are_the_same(first: int) -> None:
    """In 400 scenarios, of which the quick tests try 50."""
    preempted = 0
    for seed in range(first, first + 50):
        engine, jobs = scenario(seed)
        steps, requests = simulate(engine, jobs)
        engine.run(jobs)
        assert requests == {job.name: (job.first, job.finish, job.preemptions) for job in jobs}, seed
        assert steps == engine.steps, seed
        preempted += any(job.preemptions for job in jobs)
    assert preempted > 10
