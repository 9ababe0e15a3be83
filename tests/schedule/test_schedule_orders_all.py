"""What holds for every order."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orders_builders import FakeGroup, decide, make_tracked, standing

from hypothesis_profiles import examples
from shoal.core import SLO, ConfigError
from shoal.schedule.orders import ORDERS, DoublingBudget, FcfsStrict, order_class
from shoal.schedule.orders.doubling_budget import VARIANTS

EVERY = [cls() for cls in ORDERS.values()] + [DoublingBudget(variant=variant) for variant in VARIANTS[1:]]


class OnlyTheHead(Sequence):
    """A queue that objects to anybody who looks past its head."""

    def __init__(self, requests):
        self._requests = requests

    def __len__(self):
        return len(self._requests)

    def __iter__(self):
        raise AssertionError("an order walks through the queue")

    def __getitem__(self, at):
        assert at == 0, "an order looks past the head of a queue"
        return self._requests[0]


def a_request(name):
    return st.builds(
        make_tracked,
        st.just(name),
        prompt=st.integers(1, 5_000),
        charged_s=st.floats(0, 10),
        generated=st.integers(0, 20),
        predicted=st.integers(21, 50),
        arrival_s=st.floats(0, 5),
        slo=st.sampled_from([SLO(), SLO(ttft_s=1.0, tpot_s=0.1), SLO(e2e_s=3.0)]),
    )


@st.composite
def some_groups(draw):
    groups = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        running = draw(st.lists(a_request(name), max_size=5))
        begun = draw(st.sets(st.sampled_from(range(5))))
        last_prefill = draw(st.integers(-1, 20))
        groups.append(
            FakeGroup(
                name,
                waiting=OnlyTheHead(draw(st.lists(a_request(name), max_size=3))),
                running=running,
                prefills=[one for at, one in enumerate(running) if at in begun],
                last_step=draw(st.integers(last_prefill, 20)),
                last_prefill=last_prefill,
                streak=draw(st.integers(0, 10)),
                mean_s=draw(st.floats(0.1, 10)),
                deviation_s=draw(st.floats(0, 5)),
                finished=draw(st.sampled_from([[], [5, 30]])),
            )
        )
    return groups


@pytest.mark.parametrize("order", EVERY, ids=repr)
@settings(max_examples=examples(25), deadline=None)
@given(groups=some_groups(), step=st.integers(21, 200))
def test_everybody_has_a_turn_whatever_memory_refuses(order, groups, step):
    turns = decide(order, *groups, step=step)
    by_name = {group.service: group for group in groups}
    for turn in turns:
        assert len(set(turn.running)) == len(turn.running)
        assert set(turn.running) <= set(by_name[turn.service].running)
        if turn.waiting is not by_name[turn.service].waiting:
            assert len(turn.waiting) == 0
    for group in groups:
        own = [turn for turn in turns if turn.service == group.service]
        assert {one for turn in own for one in turn.running} == set(group.running)
        # Whoever decodes needs no prompt of another to get on.
        unconditional = {one for turn in own if not turn.prefill for one in turn.running}
        assert unconditional >= set(group.running) - set(group.prefills)
        if not isinstance(order, FcfsStrict):
            assert any(turn.waiting is group.waiting for turn in own) or not len(group.waiting)
        if not group.running and not len(group.waiting):
            assert own == []
    if isinstance(order, FcfsStrict) and turns:
        assert turns[0].waiting is by_name[turns[0].service].waiting


@pytest.mark.parametrize("order", EVERY, ids=repr)
@settings(max_examples=examples(10), deadline=None)
@given(groups=some_groups())
def test_deciding_twice_is_deciding_once(order, groups):
    first, second = (order.decide(standing(*groups, step=30), 7) for _ in range(2))
    assert list(map(_as_lists, first.turns)) == list(map(_as_lists, second.turns))
    assert first.until_ns == second.until_ns


def _as_lists(turn):
    return turn.service, list(turn.running), turn.waiting, turn.prefill


@pytest.mark.parametrize("order", EVERY, ids=repr)
def test_priorities_do_not_depend_on_who_else_is_asked_about(order):
    group = FakeGroup(running=[make_tracked(charged_s=at, generated=at, predicted=99) for at in range(6)])
    group.finished = [3, 30]
    together = list(order.priorities(group, group.running))
    assert together == [order.priorities(group, [one])[0] for one in group.running]
    assert order.rank(group.running[0], group) == order.rank(group.running[0], group)


def test_orders_are_found_by_name_and_others_refused():
    assert order_class("doubling-budget") is DoublingBudget
    assert set(ORDERS) == {
        "fcfs",
        "fcfs-strict",
        "round-robin",
        "mlfq",
        "doubling-budget",
        "shortest-remaining",
        "edf",
        "weighted-turns",
    }
    with pytest.raises(ConfigError, match="did you mean 'mlfq'"):
        order_class("mlfk")


@pytest.mark.parametrize("order", EVERY, ids=repr)
def test_nothing_to_do_is_no_turn(order):
    assert decide(order, FakeGroup("a"), FakeGroup("b")) == []
