"""Growing requests on packed engines."""

import pytest

from shoal.cluster.packing import PACKERS, DeviceGroup, Operations, Packer, Packing
from shoal.core import ConfigError
from shoal.simulate.packed_cluster import EngineSpeed, GrowingRequest, PackedCluster, PackedRun

SPEED = EngineSpeed(step_s=0.1, context_token_s=0.0, prefill_token_s=0.01)


def make_request(id: str, arrival_s: float = 0.0, prompt: int = 10, output: int = 20) -> GrowingRequest:
    return GrowingRequest(id, arrival_s, prompt, output)


class Checked:
    """A packer whose packing is checked after every batch."""

    def __init__(self, packer: Packer) -> None:
        self.packer, self.packing, self.largest = packer, packer.packing, 0

    def apply(self, operations: Operations):
        self.largest = max(self.largest, len(operations.updates))
        changes = self.packer.apply(operations)
        self.packing.check_integrity()
        return changes


def serve(requests, policy: str = "best-fit", groups: int = 4, capacity: int = 100, **options) -> PackedRun:
    packing = Packing([DeviceGroup(name=f"g{n}", capacity=capacity) for n in range(groups)])
    options = {"speed": SPEED, "expected": lambda request, generated: 20} | options
    return PackedCluster(Checked(PACKERS[policy](packing)), **options).run(requests)


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    run = serve([make_request("a")])
    # Placed at 0; ready at 0.1, so ten steps in each of the seconds from 1 and 2; gone at 3.
    assert run.active == [1, 1, 1, 0]
    assert run.used == [10, 20, 30, 0]
    assert run.latencies == [pytest.approx(3.0 / SPEED.alone_s(make_request("a")))]
    assert SPEED.alone_s(make_request("a")) == pytest.approx(2.1)
    assert (run.requests, run.finished, run.preemptions) == (1, 1, 0)


def test_steps_take_longer_with_more_kv_to_read() -> None:
    slow = EngineSpeed(step_s=0.1, context_token_s=0.01, prefill_token_s=0.0)
    assert serve([make_request("a")], speed=slow).used == [10, 15, 19, 22, 25, 28, 30, 0]


def test_requests_wait_for_room_or_are_lost() -> None:
    requests = [make_request("a", prompt=60), make_request("b", 0.5, prompt=60)]
    waiting = serve(requests, groups=1)
    assert (waiting.finished, waiting.preemptions) == (2, 0)
    assert max(waiting.active) == 1
    lost = serve(requests, groups=1, waits=False)
    assert (lost.finished, lost.preemptions) == (1, 0)


def test_growth_without_room_is_preempted_and_placed_again() -> None:
    requests = [make_request("a", prompt=40, output=30), make_request("b", prompt=40, output=30)]
    run = serve(requests)
    assert (run.finished, run.preemptions, max(run.active)) == (2, 1, 2)
    assert sum(run.migrations) == 0
    assert serve(requests, waits=False).finished == 1
    moved = serve(requests, "mell-eager")
    assert (moved.finished, moved.preemptions, sum(moved.migrations)) == (2, 0, 1)


@pytest.mark.parametrize("policy", PACKERS)
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("groups", [3, 30])
def test_every_request_ends_under_every_policy(policy, batched, groups) -> None:
    requests = [
        make_request(f"r{n}", arrival_s=n * 0.4, prompt=5 + n * 7 % 40, output=10 + n * 11 % 45)
        for n in range(60)
    ]
    run = serve(requests, policy, groups=groups, batched=batched, epoch_s=0.5)
    assert run.finished == 60
    assert all(fewest <= active for fewest, active in zip(run.fewest, run.active, strict=True))
    assert all(used <= capacity for used, capacity in zip(run.used, run.capacity, strict=True))


def test_a_request_that_fits_nowhere_is_an_error() -> None:
    with pytest.raises(ConfigError, match="longer than any group's 100 tokens"):
        serve([make_request("a", prompt=90, output=20)])
