"""How many plans are in flight by default."""

import pytest

from shoal.schedule import SchedulerOptions


@pytest.mark.parametrize(
    ("device", "options", "depth"),
    [
        ("cpu", SchedulerOptions(), 1),
        ("cuda:0", SchedulerOptions(), 2),
        ("cuda:0", SchedulerOptions(depth=1), 1),
        ("cpu", SchedulerOptions(depth=2), 2),
        ("cuda:0", SchedulerOptions(max_iterations=4), 1),
    ],
)
def test_two_steps_are_in_flight_on_gpus(device: str, options: SchedulerOptions, depth: int) -> None:
    chosen = options.with_depth_for(device)
    assert (chosen.depth, chosen.max_in_flight) == (depth, depth)
    assert SchedulerOptions().max_in_flight == 1
