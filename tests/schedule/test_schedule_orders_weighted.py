"""Weighted turns: each service as often as (N / L)^2 says, doubling budget beside."""

from collections import Counter

from orders_builders import FakeGroup, decide, make_tracked

from shoal.schedule import DoublingBudget
from shoal.schedule.orders import WeightedTurns


def test_services_step_as_often_as_their_weights_say():
    """a: 4 requests of 1 s each, weight 16; b: 4 of 2 s, weight 4; c: 2 of 2 s, weight 1."""
    groups = {
        name: FakeGroup(name, running=[make_tracked(name) for _ in range(count)], mean_s=mean_s)
        for name, count, mean_s in (("a", 4, 1.0), ("b", 4, 2.0), ("c", 2, 2.0))
    }
    steps = Counter()
    for step in range(2_100):
        chosen = decide(WeightedTurns(), *groups.values(), step=step)[0].service
        groups[chosen].last_step = step
        steps[chosen] += 1
    assert abs(steps["a"] - 1_600) < 80
    assert abs(steps["b"] - 400) < 60
    assert abs(steps["c"] - 100) < 40


def test_a_newcomer_counts_where_it_can_join():
    """Each has one that runs, b also one that waits: with it b's weight is larger."""
    a = FakeGroup("a", running=[make_tracked("a")], mean_s=1.0)
    b = FakeGroup("b", running=[make_tracked("b")], waiting=[make_tracked("b")], mean_s=1.5)
    turns = decide(WeightedTurns(), a, b)
    assert [(turn.service, turn.prefill) for turn in turns] == [("b", True), ("a", False), ("b", False)]


def test_within_a_service_and_for_memory_it_is_doubling_budget():
    group = FakeGroup(running=[make_tracked(charged_s=at) for at in (0.5, 2.5, 0.9, 0.0)], mean_s=1.0)
    ours, budgets = WeightedTurns(), DoublingBudget()
    assert ours.priorities(group, group.running) == budgets.priorities(group, group.running)
    assert [ours.rank(one, group) for one in group.running] == [
        budgets.rank(one, group) for one in group.running
    ]
    [turn] = decide(ours, group)
    assert [one.charged_ns / 1e9 for one in turn.running] == [0.9, 0.5, 2.5, 0.0]
