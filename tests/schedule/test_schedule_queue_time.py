"""How long a request waited until it was first admitted, as its events tell it."""

from dataclasses import replace

from schedule_builders import make_request, make_scheduler

from shoal.core import StepResult


def arrived(at_ns, **fields):
    return replace(make_request(fields.pop("prompt", [1, 2]), None, **fields), arrival_ns=at_ns)


def step(scheduler, now_ns, *tokens):
    plan = scheduler.schedule(now_ns)
    return scheduler.update(plan, StepResult.of_step(list(tokens), 10), now_ns + 10)


def test_the_first_event_and_the_last_have_the_time_from_arrival_to_admission():
    scheduler = make_scheduler(max_running=1)
    for name, arrival_ns in (("x", 5), ("y", 7)):
        scheduler.submit(arrived(arrival_ns, id=name, max_tokens=3), 8)
    reported = []
    for now_ns in range(100, 700, 100):
        reported += [(event.request_id, event.queue_ns) for event in step(scheduler, now_ns, 9)]
    assert reported == [("x", 95), ("x", 0), ("x", 95), ("y", 393), ("y", 0), ("y", 393)]


def test_a_chunked_prompt_has_waited_until_its_first_chunk():
    scheduler = make_scheduler(max_batched_tokens=4)
    scheduler.submit(arrived(0, prompt=[1] * 10, max_tokens=2), 0)
    assert step(scheduler, 100) == []
    assert step(scheduler, 200) == []
    (event,) = step(scheduler, 300, 9)
    assert event.queue_ns == 100


def test_a_resumed_request_keeps_its_queue_time():
    scheduler, other = make_scheduler(), make_scheduler()
    scheduler.submit(arrived(0, id="x", max_tokens=3), 0)
    step(scheduler, 100, 9)
    other.submit(scheduler.detach("x", 200), 1000)
    assert [event.queue_ns for event in step(other, 5000, 9)] == [0]
    assert [event.queue_ns for event in step(other, 6000, 9)] == [100]
