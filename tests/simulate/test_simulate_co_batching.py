"""Services on the same weights decode in one step of virtual time, too."""

from dataclasses import replace

import pytest
from simulate_builders import PLAIN, TIMES, make_request, make_workload, run

from shoal.forecast import StepRows
from shoal.schedule import Fcfs, Order, WeightedTurns
from shoal.simulate import EngineSpec, ServiceSpec, token_layout

NAMES = ("a", "b")


def make_spec(blocks: int = 400, **knobs: object) -> EngineSpec:
    """Two services on the same weights."""
    layout = token_layout(blocks, 4, *NAMES)
    service = ServiceSpec(times=TIMES, execution_s=1.0, weights="shared")
    return EngineSpec(
        services=dict.fromkeys(NAMES, service),
        layout=layout,
        scheduler=replace(PLAIN, **knobs),  # type: ignore[arg-type]
        host=layout,
    )


def seconds(rows: StepRows) -> int:
    return round(TIMES.step_time(rows) * 1e9)


def test_a_step_takes_the_time_of_all_of_its_rows() -> None:
    requests = [make_request(0, 10, 4), make_request(1, 20, 3, service="b")]
    record, log = run([make_spec()], requests)
    steps = [
        StepRows(0, 0, ((10, 0),), 1),
        StepRows(1, 11, ((20, 0),), 2),
        StepRows(2, 12 + 21, (), 2),
        StepRows(2, 13 + 22, (), 2),
    ]
    assert record.end_ns == sum(map(seconds, steps))
    assert [line.split(" | ")[0] for line in log] == [
        "0: 0 a: 0+10*",
        "0: 1 b: 1+20*; a: 0+1*",
        "0: 2 a: 0+1*; b: 1+1*",
        "0: 3 a: 0+1*; b: 1+1*",
    ]
    assert [(span.service, span.steps, span.decodes) for span in record.spans] == [
        ("a", 1, 0),
        ("b", 1, 1),
        ("a", 2, 2),
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", [Fcfs(), WeightedTurns()], ids=str)
def test_what_happens_does_not_depend_on_skipping_ahead(depth: int, order: Order) -> None:
    requests = make_workload(80, services=NAMES, rate=60.0)
    spec = make_spec(60, depth=depth, order=order, preemption_mode="swap")
    skipping, stepping = (run([spec], requests, skip_ahead=skip) for skip in (True, False))
    assert skipping == stepping
    assert any("; " in line for line in skipping[1])


def test_a_busy_engine_serves_more() -> None:
    requests = make_workload(120, services=NAMES, rate=1e6)
    together, _ = run([make_spec()], requests)
    apart, _ = run([make_spec(co_batch=False)], requests)
    assert together.end_ns < 0.8 * apart.end_ns
    assert {row.request_id: row.output_tokens for row in together.requests} == {
        row.request_id: row.output_tokens for row in apart.requests
    }
