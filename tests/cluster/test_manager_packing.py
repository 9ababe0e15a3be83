"""A packer as dispatch: it places requests, moves them as they grow, and withdraws who has room nowhere."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manager_builders import SPEED, Bench, dispatched

from hypothesis_profiles import examples
from shoal.cluster.manager import repacking
from shoal.cluster.manager.actions import ClusterAction, Dispatch, Reserve, UnloadService, Withdraw
from shoal.cluster.manager.dispatch import PackerDispatch, dispatch_named
from shoal.cluster.manager.engine_load import EngineLoad, UnassignedRequest
from shoal.cluster.manager.events import (
    EngineDraining,
    EpochBegan,
    MigrationCopied,
    MigrationDeclined,
    MigrationFailed,
    MigrationMethod,
    MigrationReserved,
    MigrationStopped,
    MigrationWanted,
    ServicePlaced,
    ServiceUnloaded,
    Submitted,
)
from shoal.cluster.manager.packer_chooser import AHEAD_EPOCHS, PackerChooser
from shoal.cluster.manager.state import Engine, Residence
from shoal.cluster.options import ClusterOptions, PackingOptions
from shoal.cluster.packing import (
    EpochSpending,
    MigrationBudgets,
    MigrationCandidate,
    PackerTuning,
    choose_methods,
)
from shoal.cluster.status import EngineState
from shoal.core import ConfigError


def packing_bench(
    *engines: str,
    dispatch: str = "best-fit",
    tokens: int = 100,
    kv_format: str = "f",
    host: str = "",
    **budgets: int,
) -> Bench:
    """Engines that hold ``tokens`` each, and a packer that looks one token ahead."""
    options = PackingOptions(epoch_s=SPEED.decode_s / AHEAD_EPOCHS, budgets=MigrationBudgets(**budgets))
    bench = Bench(ClusterOptions(packing=options), dispatch)
    bench.kv_format, bench.kv_tokens = kv_format, {"a": tokens, "b": tokens // 2}
    bench.host = host
    bench.add(*engines, services=("a", "b"))
    return bench


def epoch(bench: Bench, **tokens: int) -> list[ClusterAction]:
    return bench.emit(EpochBegan(tokens))


def engines_of(actions: Sequence[ClusterAction]) -> dict[str, str]:
    return {request: engine for request, engine, _ in dispatched(actions)}


def place(bench: Bench, **prompts: int) -> dict[str, str]:
    """Requests arrive one after the other: who goes where."""
    return engines_of(
        [each for name, prompt in prompts.items() for each in bench.submit(name, prompt=prompt)]
    )


def withdrawals(bench: Bench) -> dict[str, int]:
    return {engine.name: engine.withdrawn for engine in bench.manager.engines}


def test_requests_go_where_the_packer_puts_them() -> None:
    prompts = {"r0": 30, "r1": 30, "r2": 60, "r3": 20}
    best = place(packing_bench("e0", "e1"), **prompts)
    worst = place(packing_bench("e0", "e1", dispatch="worst-fit"), **prompts)
    # Each is a token larger than its prompt when the epoch ends.
    assert best == {"r0": "e0", "r1": "e0", "r2": "e1", "r3": "e0"}
    assert worst == {"r0": "e0", "r1": "e0", "r2": "e1", "r3": "e1"}


def test_engines_stay_empty_while_others_have_room() -> None:
    bench = packing_bench("e0", "e1", "e2", dispatch="mell")
    assert set(place(bench, **{f"r{number}": 10 for number in range(7)}).values()) == {"e0"}


def test_a_token_takes_what_its_service_needs() -> None:
    bench = packing_bench("e0", "e1")
    # 40 tokens of b are 80 of a.
    assert engines_of(bench.submit("r0", "b", prompt=40)) == {"r0": "e0"}
    assert place(bench, r1=30, r2=10) == {"r1": "e1", "r2": "e0"}


def test_choices_share_their_prompt() -> None:
    bench = packing_bench("e0", "e1")
    bench.submit("r0", prompt=40, choices=10)
    assert place(bench, r1=55, r2=45) == {"r1": "e1", "r2": "e0"}


def test_requests_wait_for_room_in_their_order() -> None:
    bench = packing_bench("e0")
    assert place(bench, r0=80, r1=60, r2=5) == {"r0": "e0"}
    assert bench.manager.waiting("a") == 2
    # One of another service is not held up.
    assert engines_of(bench.submit("r3", "b", prompt=5)) == {"r3": "e0"}
    assert engines_of(bench.end("r0")) == {"r1": "e0", "r2": "e0"}
    assert bench.manager.waiting("a") == 0


def test_a_request_that_no_engine_could_hold_gets_one_of_its_own() -> None:
    bench = packing_bench("e0", "e1")
    assert place(bench, r0=5, r1=150, r2=5) == {"r0": "e0", "r1": "e1", "r2": "e0"}
    assert epoch(bench, r0=1, r1=3, r2=1) == []


def test_growth_migrates_a_request_with_its_kv() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell")
    place(bench, r0=60, r1=30)
    assert epoch(bench, r0=1, r1=1) == []
    actions = epoch(bench, r0=7, r1=1)
    assert actions == [Reserve("r1m1", "r1", "e1")]
    actions = bench.emit(MigrationReserved("r1m1"), MigrationCopied("r1m1"), MigrationStopped("r1m1"))
    assert bench.manager.owner("r1") == "e1"
    assert withdrawals(bench) == {"e0": 0, "e1": 0}


def test_a_request_migrates_by_tokens_where_its_kv_cannot() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell", kv_format="")
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    assert epoch(bench, r0=7, r1=1) == [Withdraw("r1"), Dispatch("r1", "e1", 1, 2)]


@pytest.mark.parametrize(
    ("budgets", "moves"),
    [
        ({}, "kv"),
        ({"engine_bytes": 310}, "kv"),
        ({"engine_bytes": 309}, "tokens"),
        ({"engine_bytes": 309, "prefill_tokens": 31}, "tokens"),
        ({"engine_bytes": 309, "prefill_tokens": 30}, "stays"),
    ],
)
def test_migrations_stay_within_their_budgets(budgets: dict[str, int], moves: str) -> None:
    bench = packing_bench("e0", "e1", dispatch="mell", **budgets)
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    actions = epoch(bench, r0=7, r1=1)
    kinds: dict[tuple[type, ...], str] = {(Reserve,): "kv", (Withdraw, Dispatch): "tokens", (): "stays"}
    assert kinds[tuple(type(action) for action in actions)] == moves
    # Who had to stay is thought of in the next epoch again, which has a budget of its own.
    assert epoch(bench, r0=7, r1=1) == (actions if moves == "stays" else [])


@pytest.mark.parametrize(("host", "migrates"), [("h", True), ("", False)])
def test_the_budget_of_a_host_is_for_migrations_to_other_hosts(host: str, migrates: bool) -> None:
    bench = packing_bench("e0", "e1", dispatch="mell", host=host, host_bytes=0, prefill_tokens=0)
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    assert epoch(bench, r0=7, r1=1) == ([Reserve("r1m1", "r1", "e1")] if migrates else [])


@pytest.mark.parametrize(("quiet", "moves"), [(0, {"r2": "e0"}), (4, {"r1": "e0"})])
def test_a_request_does_not_migrate_twice_in_five_epochs(quiet: int, moves: dict[str, str]) -> None:
    bench = packing_bench("e0", "e1", dispatch="mell", kv_format="")
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    assert engines_of(epoch(bench, r0=7, r1=1)) == {"r1": "e1"}
    bench.progress("r1")
    bench.end("r0")
    assert place(bench, r2=60) == {"r2": "e1"}
    for _ in range(quiet + 1):
        assert epoch(bench, r1=2, r2=1) == []
    # One of them is to leave, and r1 is the smaller.
    assert engines_of(epoch(bench, r1=9, r2=2)) == moves


def test_a_request_without_room_is_withdrawn_and_resumed_later() -> None:
    bench = packing_bench("e0", "e1")
    assert place(bench, r0=80, r1=80, r2=15) == {"r0": "e0", "r1": "e1", "r2": "e0"}
    epoch(bench, r0=1, r1=1, r2=0)
    assert epoch(bench, r0=5, r1=5, r2=1) == [Withdraw("r2")]
    assert (withdrawals(bench), bench.manager.waiting("a")) == ({"e0": 1, "e1": 0}, 1)
    assert epoch(bench, r0=6, r1=6, r2=1) == []
    assert bench.end("r1") == [Dispatch("r2", "e1", 1, 2)]


def test_a_declined_migration_leaves_the_request_where_it_was() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell")
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    epoch(bench, r0=7, r1=1)
    bench.emit(MigrationDeclined("r1m1", "no room"))
    assert bench.manager.owner("r1") == "e0"
    # It counts at e0, not at e1.
    assert place(bench, r2=95) == {"r2": "e1"}


def test_a_migrating_request_counts_at_its_destination() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell")
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    epoch(bench, r0=7, r1=1)
    assert place(bench, r2=70) == {}
    assert place(bench, r3=1) == {}, "it waits behind r2"


def test_migrations_by_administrators_are_followed() -> None:
    bench = packing_bench("e0", "e1")
    place(bench, r0=40, r1=40)
    bench.emit(
        MigrationWanted("r1", "e1", MigrationMethod.LIVE), MigrationReserved("r1m1"), MigrationStopped("r1m1")
    )
    assert bench.manager.owner("r1") == "e1"
    assert place(bench, r2=55, r3=55) == {"r2": "e0", "r3": "e1"}


def test_requests_of_a_dead_engine_go_where_there_is_room() -> None:
    bench = packing_bench("e0", "e1")
    place(bench, r0=60, r1=60)
    assert place(bench, r2=35) == {"r2": "e0"}
    assert engines_of(bench.die("e0", 1)) == {}
    assert bench.manager.waiting("a") == 2, "r2 waits behind r0, which has room nowhere"
    bench.wait(2)
    assert engines_of(bench.ready("e0", 2))["r0"] == "e0"
    assert bench.manager.waiting("a") == 0


def test_a_drained_engine_gets_nothing_and_its_requests_leave_as_there_is_room() -> None:
    bench = packing_bench("e0", "e1", "e2")
    assert place(bench, r0=30, r1=30, r2=60, r3=60) == {"r0": "e0", "r1": "e0", "r2": "e1", "r3": "e2"}
    actions = bench.emit(EngineDraining("e0"))
    assert [each.engine for each in actions if isinstance(each, Reserve)] == ["e1", "e2"]
    assert place(bench, r4=5) == {"r4": "e1"}


def test_engines_that_do_not_say_what_they_have_hold_everything() -> None:
    bench = Bench(ClusterOptions(), "mell")
    bench.add("e0", "e1")
    assert set(place(bench, **{f"r{number}": 10_000 for number in range(50)}).values()) == {"e0"}


def test_policies_ignore_epochs() -> None:
    bench = Bench()
    bench.add("e0")
    bench.submit("r0")
    assert epoch(bench, r0=100_000) == []


def test_epochs_have_a_length() -> None:
    with pytest.raises(ConfigError, match=r"packing.epoch must be more than 0, got 0 s"):
        PackingOptions(epoch_s=0)


# What happened behind the packer's back


@given(data=st.data())
@settings(max_examples=examples(200))
def test_the_choice_is_best_fits_whatever_happened_to_loads(data: st.DataObject) -> None:
    engines = {f"e{number}": _engine(f"e{number}", data) for number in range(3)}
    dispatch = dispatch_named("best-fit")
    assert isinstance(dispatch, PackerDispatch)
    packed = PackerChooser(dispatch.packer(PackerTuning()), engines, epoch_s=SPEED.decode_s / AHEAD_EPOCHS)
    sizes: dict[str, int] = {}
    for number in range(data.draw(st.integers(1, 25))):
        size = data.draw(st.integers(1, 60))
        new = _unassigned(f"r{number}", size)
        sizes[new.call.request] = size + 1
        chosen = packed.choose(new, [engine.load for engine in engines.values()])
        free = {name: engine.kv_bytes - _used(engine, sizes) for name, engine in engines.items()}
        used = [room for name, room in free.items() if engines[name].load.assigned and size + 1 <= room]
        idle = [room for name, room in free.items() if not engines[name].load.assigned and size + 1 <= room]
        # The fullest that has something and room, else the largest that has nothing.
        best = min(used) if used else max(idle, default=None)
        assert (None if chosen is None else free[chosen.name]) == best
        assert not used or chosen is None or chosen.assigned
        if chosen is not None:
            chosen.add(new)
        for request in data.draw(st.lists(st.sampled_from(sorted(sizes)), max_size=3, unique=True)):
            _change(request, engines, sizes, data)


def _engine(name: str, data: st.DataObject) -> Engine:
    engine = Engine(EngineLoad(name), EngineState.READY, 1, runs=True)
    engine.load.begin({"a": SPEED})
    tokens = data.draw(st.integers(61, 150))
    engine.kv_bytes, engine.load.kv_tokens = tokens, {"a": tokens}
    engine.residences["a"] = Residence.LOADED
    return engine


def _unassigned(request: str, prompt: int) -> UnassignedRequest:
    return UnassignedRequest(Submitted(request, "a", prompt, 100), 1, turn=0, now_ns=0)


def _used(engine: Engine, sizes: dict[str, int]) -> int:
    return sum(sizes[request] for request in engine.load.assigned)


def _change(request: str, engines: dict[str, Engine], sizes: dict[str, int], data: st.DataObject) -> None:
    """A request ends, or is somewhere else."""
    holders = [engine for engine in engines.values() if request in engine.load.assigned]
    for engine in holders:
        engine.load.remove(request)
    if holders and data.draw(st.booleans()):
        target = data.draw(st.sampled_from(sorted(engines)))
        engines[target].load.add(_unassigned(request, sizes[request] - 1))


# What a reading of the code found


@pytest.mark.parametrize("dispatch", ["load-balance", "mell-eager", "mell-literal", "mell"])
def test_two_decisions_of_one_event_may_be_about_one_request(dispatch: str) -> None:
    bench = packing_bench("e0", "e1", dispatch=dispatch)
    bench.kv_tokens = {"a": 100, "b": 100}
    prompts = [
        ("r0", "a", 20),
        ("r1", "b", 28),
        ("r2", "a", 70),
        ("r3", "b", 45),
        ("r5", "a", 8),
        ("r6", "a", 30),
    ]
    for request, service, prompt in prompts:
        bench.submit(request, service, prompt=prompt)
    moves = [each for each in bench.end("r0") if isinstance(each, Reserve)]
    assert len({each.request for each in moves}) == len(moves)


def test_a_service_that_is_unloaded_gets_no_request() -> None:
    bench = packing_bench("e0")
    bench.emit(ServicePlaced("a", ("e0",), 5.0))
    place(bench, r0=10)
    bench.end("r0")
    while not any(isinstance(each, UnloadService) for each in bench.wait(0.25, ("e0", 1))):
        pass
    assert place(bench, r1=10) == {}
    bench.emit(ServiceUnloaded("e0", 1, "a"))
    assert place(bench, r2=10) == {}
    assert epoch(bench, r1=0, r2=0) == []
    assert bench.manager.waiting("a") == 2


def test_services_take_turns_by_the_order_of_submission() -> None:
    bench = packing_bench("e0")
    bench.submit("x", "a", prompt=60)
    bench.submit("a0", "a", prompt=60)
    bench.submit("b0", "b", prompt=30)
    bench.submit("a1", "a", prompt=60)
    assert [engines_of(bench.end(request)) for request in ("x", "a0", "b0")] == [
        {"a0": "e0"},
        {"b0": "e0"},
        {"a1": "e0"},
    ]


def test_a_request_that_has_waited_long_for_room_is_not_bypassed() -> None:
    bench = packing_bench("e0", "e1")
    place(bench, r0=50, r1=60)
    assert place(bench, big=95) == {}
    assert engines_of(bench.submit("b0", "b", prompt=5)) == {"b0": "e1"}, "there is room for it"
    bench.wait(11, ("e0", 1), ("e1", 1))
    assert engines_of(bench.submit("b1", "b", prompt=5)) == {}
    assert engines_of(bench.end("b0")) == {}
    assert engines_of(bench.end("r1")) == {"big": "e1", "b1": "e0"}


def test_nothing_is_withdrawn_for_a_migration_that_does_not_start() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell-eager", engine_bytes=0, prefill_tokens=0)
    prompts = {"r0": 35, "r1": 40, "r2": 20, "r3": 55, "r4": 70, "r5": 8, "r6": 40, "r7": 8}
    place(bench, **prompts)
    output = dict.fromkeys(prompts, 0)
    withdrawn: Counter[str] = Counter()
    for _ in range(9):
        for request in output:
            output[request] += bench.manager.owner(request) is not None
        actions = epoch(bench, **output)
        again = {each.request: each.engine for each in actions if isinstance(each, Dispatch)}
        withdrawn.update(
            each.request for each in actions if isinstance(each, Withdraw) and each.request in again
        )
    assert not withdrawn


def test_kv_that_was_lost_is_not_sent_again_but_budgeted_as_tokens() -> None:
    bench = packing_bench("e0", "e1", dispatch="mell", prefill_tokens=0)
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    epoch(bench, r0=7, r1=1)
    bench.emit(MigrationReserved("r1m1"), MigrationStopped("r1m1"), MigrationFailed("r1m1", "lost"))
    assert bench.manager.owner("r1") == "e0"
    later = [each for tokens in range(8, 16) for each in epoch(bench, r0=tokens, r1=1)]
    assert not any(isinstance(each, Withdraw) and each.request == "r1" for each in later)


def test_another_request_relieves_an_engine_after_a_declined_migration() -> None:
    bench = packing_bench("e0", "e1", "e2", dispatch="mell")
    place(bench, r0=60, r1=30)
    epoch(bench, r0=1, r1=1)
    epoch(bench, r0=7, r1=1)
    bench.emit(MigrationDeclined("r1m1", "no room"))
    moves = [each for each in epoch(bench, r0=8, r1=1) if isinstance(each, Reserve)]
    assert [each.request for each in moves] == ["r0"]


def test_an_engine_that_has_room_again_is_not_relieved_first(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates: list[MigrationCandidate] = []

    def note(wanted: Sequence[MigrationCandidate], spending: EpochSpending) -> dict[str, MigrationMethod]:
        candidates.extend(wanted)
        return choose_methods(wanted, spending)

    monkeypatch.setattr(repacking, "choose_methods", note)
    bench = packing_bench("e0", "e1", dispatch="load-balance", engine_bytes=0, prefill_tokens=0)
    place(bench, dead=60, p=15, q=15, z=30, t=5)
    epoch(bench, dead=0, p=0, q=0, t=0, z=0)
    bench.end("z")
    bench.end("dead")
    candidates.clear()
    epoch(bench, p=5, q=5, t=1)
    assert candidates
    assert not any(move.relieves for move in candidates)
    mell = packing_bench("e0", "e1", dispatch="mell")
    place(mell, r0=60, r1=30)
    epoch(mell, r0=1, r1=1)
    candidates.clear()
    epoch(mell, r0=7, r1=1)
    assert [move.relieves for move in candidates] == [True]


def test_engines_that_came_since_the_last_epoch_are_on_their_hosts() -> None:
    bench = packing_bench("e0", "e1", dispatch="load-balance", host="h", host_bytes=0, prefill_tokens=0)
    place(bench, r0=30, r1=60)
    assert Reserve("r0m1", "r0", "e1") in bench.submit("r2", prompt=30)
