"""One migration, in all orders of all that can happen, with whatever may fail."""

import pickle

import pytest
from protocol_world import TOKENS, World

from shoal.cluster.manager.events import MoveMethod
from shoal.cluster.manager.migration_state import TRANSITIONS, MoveState

SITUATIONS = {
    "live": (MoveMethod.LIVE, 1, False, False),
    "stop": (MoveMethod.STOP, 0, False, False),
    "tokens": (MoveMethod.TOKENS, 0, False, False),
    "declined": (MoveMethod.LIVE, 0, True, False),
    "not exported": (MoveMethod.LIVE, 0, False, True),
}
"""Method, rounds before the request is stopped, whether the destination has no room, whether the source
refuses."""


def walk(world: World, faults: int) -> list[World]:
    """Try all orders of what can happen, with at most so many faults; the worlds in which all is over."""
    seen: set[bytes] = set()
    over: list[World] = []
    stack = [(pickle.dumps(world), faults)]
    while stack:
        state, left = stack.pop()
        key = state + bytes([left])
        if key in seen:
            continue
        seen.add(key)
        now = pickle.loads(state)
        harmless = set(now.choices(0))
        for choice in now.choices(left):
            following = pickle.loads(state)
            following.do(choice)
            following.check()
            stack.append((pickle.dumps(following), left - (choice not in harmless)))
        if not harmless:
            now.finish()
            now.check_end()
            over.append(now)
    return over


def check_samples(world: World) -> None:
    """Where no engine died and nobody left, every token was sampled once, unless the KV was computed anew."""
    anew = any(ended.method is MoveMethod.TOKENS for ended in world.moves_ended)
    if not world.crashes and not world.cancelled and not anew:
        assert sorted(world.sampled) == list(range(TOKENS))


def test_every_order_of_events_with_one_fault_ends_well():
    World.taken.clear()
    for situation in ("live", "stop", "tokens", "declined"):
        for world in walk(World(*SITUATIONS[situation]), 1):
            check_samples(world)
    # No transition of the table was left out.
    assert {(state, after) for state, allowed in TRANSITIONS.items() for after in allowed} == World.taken


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_order_of_events_with_two_faults_ends_well(situation):
    for world in walk(World(*SITUATIONS[situation]), 2):
        check_samples(world)


def test_a_migration_takes_no_other_transition():
    world = World(*SITUATIONS["live"])
    [move] = world.manager._migrations._moves.values()
    with pytest.raises(RuntimeError, match="cannot go from reserving to committing"):
        move.go(MoveState.COMMITTING)


def test_a_live_move_without_faults():
    world = World(*SITUATIONS["live"])
    while choices := world.choices(0):
        # The source samples only when it has nothing to send.
        world.do(min(choices, key=lambda choice: choice[0] == "sample"))
    world.check_end()
    [ended] = world.moves_ended
    assert (ended.source, ended.target, ended.outcome) == ("S", "D", "done")
    assert world.sampled == list(range(TOKENS))
