"""One migration, in all orders of all that can happen, with whatever may fail."""

import pickle

import pytest
from protocol_world import TOKENS, World

from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.manager.migration_state import TRANSITIONS, MigrationState

SITUATIONS = {
    "live": (MigrationMethod.LIVE, 1, False, False),
    "stop": (MigrationMethod.STOP, 0, False, False),
    "tokens": (MigrationMethod.TOKENS, 0, False, False),
    "declined": (MigrationMethod.LIVE, 0, True, False),
    "not exported": (MigrationMethod.LIVE, 0, False, True),
}
"""Method, rounds before the request is stopped, whether the destination has no room, whether the source
refuses."""
MOVING = ("live", "stop", "tokens", "declined")

HANDLERS = World(*SITUATIONS["live"]).manager._handlers


def walk(world: World, faults: int) -> None:
    """Try all orders of what can happen, with at most so many faults, and check how they end."""
    seen: set[bytes] = set()
    stack = [(freeze(world), faults)]
    while stack:
        state, left = stack.pop()
        key = state + bytes([left])
        if key in seen:
            continue
        seen.add(key)
        now = thaw(state)
        harmless = set(now.choices(0))
        choices = now.choices(left)
        for number, choice in enumerate(choices):
            following = now if number == 0 and harmless else thaw(state)
            following.do(choice)
            following.check()
            if not following.samples_once:
                following.sampled.clear()  # it says nothing any more, and would make equal worlds different
            stack.append((freeze(following), left - (choice not in harmless)))
        if not harmless:
            now.finish()
            now.check_end()


def freeze(world: World) -> bytes:
    """The world but for the manager's methods by kind of event, which are much of it and never change."""
    handlers, world.manager._handlers = world.manager._handlers, {}
    try:
        return pickle.dumps(world)
    finally:
        world.manager._handlers = handlers


def thaw(state: bytes) -> World:
    """The world that was frozen."""
    world: World = pickle.loads(state)
    world.manager._handlers = {
        kind: getattr(world.manager, method.__name__) for kind, method in HANDLERS.items()
    }
    return world


@pytest.mark.slow
def test_every_order_of_events_with_one_fault_ends_well():
    World.taken.clear()
    for situation in MOVING:
        walk(World(*SITUATIONS[situation]), 1)
    # No transition of the table was left out.
    assert {(state, after) for state, allowed in TRANSITIONS.items() for after in allowed} == World.taken


@pytest.mark.slow
@pytest.mark.parametrize(("situation", "faults"), [("not exported", 1), *((name, 2) for name in MOVING)])
def test_every_order_of_events_with_more_faults_ends_well(situation, faults):
    """Where the source refuses, it does so again and again: two faults would take as long as all others."""
    walk(World(*SITUATIONS[situation]), faults)


def test_a_migration_takes_no_other_transition():
    world = World(*SITUATIONS["live"])
    [move] = world.manager._migrations._active.values()
    with pytest.raises(RuntimeError, match="cannot go from reserving to committing"):
        move.transition_to(MigrationState.COMMITTING)


def test_a_live_migration_without_faults():
    world = World(*SITUATIONS["live"])
    while choices := world.choices(0):
        # The source samples only when it has nothing to send.
        world.do(min(choices, key=lambda choice: choice[0] == "sample"))
    world.check_end()
    [ended] = world.migrations_ended
    assert (ended.source, ended.target, ended.outcome) == ("S", "D", "done")
    assert world.sampled == list(range(TOKENS))
