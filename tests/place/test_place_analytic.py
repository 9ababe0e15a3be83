"""Estimates by formulas under a limit on running requests."""

from dataclasses import replace

import pytest

from shoal.core.cluster import Device
from shoal.forecast import RooflineTimes, StepTimes, device_spec, model_spec
from shoal.place.analytic import AnalyticGroups
from shoal.place.memory import MemoryCheck, PlacedService
from shoal.place.placement import Group, Placement
from shoal.place.traffic import ServiceLoad

MODEL = model_spec("llama-2-7b")
A800 = device_spec("a800")
LOAD = ServiceLoad(
    requests=600, rate_per_s=10, prompt_tokens=200, output_tokens=100, execution_s=1.5, goal_s=5.0
)


def times(name: str, kind: str, tp: int) -> StepTimes:
    return RooflineTimes(MODEL, device_spec(kind), tp)


def groups(max_running: int | None, **loads: ServiceLoad) -> AnalyticGroups:
    services = {name: PlacedService(name=name, model=MODEL, weights=name) for name in loads}
    return AnalyticGroups(loads, times, MemoryCheck(services), max_running=max_running)


def attained(max_running: int | None, engines: int, **loads: ServiceLoad) -> float:
    """Share of the goals that all services meet on so many engines, all on each."""
    devices = [
        Device(name=f"d{at}", kind="a800", host="h", memory_bytes=A800.memory_bytes) for at in range(engines)
    ]
    placement = Placement.sharing(([device], loads) for device in devices)
    found = groups(max_running, **loads).serve([group.shape for group in placement.groups])
    parts = [part for each in found for part in each.values()]
    return 1 - sum(part.unserved for part in parts) / sum(part.requests for part in parts)


def test_a_limit_on_running_requests_may_be_what_an_engine_lacks() -> None:
    """Ten requests a second of about a second each need more than four slots; memory has room for all."""
    assert attained(None, 1, a=LOAD) > 0.9
    assert attained(4, 1, a=LOAD) < 0.5
    assert attained(4, 4, a=LOAD) > 0.9


@pytest.mark.parametrize("most", [None, 256])
def test_a_limit_that_is_never_reached_changes_nothing(most: int | None) -> None:
    shape = Group(
        devices=(Device(name="d", kind="a800", host="h", memory_bytes=A800.memory_bytes),),
        shares=(("a", 1.0), ("b", 1.0)),
    ).shape
    other = replace(LOAD, rate_per_s=1, requests=60)
    assert groups(most, a=LOAD, b=other).serve([shape]) == groups(10_000, a=LOAD, b=other).serve([shape])


def test_services_of_an_engine_share_the_limit_as_they_share_the_work() -> None:
    """A service with little to do does not take half of the slots."""
    little = replace(LOAD, rate_per_s=0.1, requests=6)
    assert attained(16, 1, a=LOAD, b=little) == pytest.approx(attained(16, 1, a=LOAD), abs=0.05)
