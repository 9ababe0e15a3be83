"""A manager among engines that die, and whose messages come late, twice and in any order."""

import io
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from manager_builders import SECOND, SPEED

from hypothesis_profiles import examples
from shoal.cluster.manager.actions import (
    Abort,
    ClusterAction,
    Commit,
    Dispatch,
    Export,
    KillEngine,
    MigrationEnded,
    MigrationOutcome,
    RefusalKind,
    Refuse,
    Release,
    Reserve,
    StartEngine,
    StopEngine,
    Withdraw,
)
from shoal.cluster.manager.dispatch import DISPATCH_NAMES, dispatch_named
from shoal.cluster.manager.event_log import EventLogWriter, replay
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineActivated,
    EngineAdded,
    EngineDeactivated,
    EngineDraining,
    EngineEnded,
    EngineFound,
    EngineHeartbeat,
    EngineLoading,
    EngineProcessUsage,
    EngineReady,
    EngineRemoved,
    EngineUndrained,
    EpochBegan,
    MigrationCopied,
    MigrationDeclined,
    MigrationFailed,
    MigrationMethod,
    MigrationNotExported,
    MigrationReserved,
    MigrationStopped,
    MigrationWanted,
    Progressed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions, PackingOptions, RestartOptions
from shoal.cluster.packing import PACKERS, MigrationBudgets

SERVICES = {"e0": ("a", "b"), "e1": ("a", "b"), "e2": ("a",), "e3": ("b",)}
KV_FORMATS = {"e0": {"a": "x", "b": "x"}, "e1": {"a": "x", "b": "y"}, "e2": {"a": "x"}, "e3": {"b": "x"}}
"""By engine and service; KV can go between e0, e1 and e2 for a, and between e0 and e3 for b."""
KV_TOKENS = {"e0": 70, "e1": 70, "e2": 45, "e3": 120}
"""By engine: one large request, or a few small ones; the largest requests fit some engines, or none."""
OPTIONS = {
    "heartbeat_s": 1.0,
    "hung_after_s": 4.0,
    "load_timeout_s": 8.0,
    "wait_for_engine_s": 20.0,
    "restart": RestartOptions(first_s=0.5, factor=2, max_s=4.0),
}


def ready(engine: str, incarnation: int) -> EngineReady:
    """An engine has loaded."""
    speeds = dict.fromkeys(SERVICES[engine], SPEED)
    kv_tokens = dict.fromkeys(SERVICES[engine], KV_TOKENS[engine])
    return EngineReady(engine, incarnation, speeds, KV_FORMATS[engine], 2 * KV_TOKENS[engine], kv_tokens)


@dataclass
class ModelRequest:
    """What must be true of a request, from the events and actions so far."""

    service: str
    longest: int
    """Tokens that it may become."""
    owner: tuple[str, int] | None = None
    attempt: int = 0
    waits_since_ns: int = 0
    deaths: int = 0
    deaths_alone: int = 0
    alone: bool = False
    """It is in quarantine."""


@dataclass
class ModelEngine:
    """What must be true of an engine that is wanted."""

    incarnation: int
    state: str = "loading"
    """loading, ready, killed or gone."""
    draining: bool = False
    standby: str = ""
    """going: it drains to go there; there; or neither."""
    requests: list[str] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return not self.draining and not self.standby


@dataclass
class ModelMigration:
    """A migration with KV that is not over."""

    request: str
    source: str
    target: str
    keeper: str | None
    """Who has blocks for the request, beside the engine that has it."""


class ManagerMachine(RuleBasedStateMachine):
    """Processes that live and die by themselves, and a model of what a manager may do."""

    @initialize(
        dispatch=st.sampled_from(sorted(DISPATCH_NAMES)),
        budgets=st.lists(st.none() | st.integers(0, 60), min_size=2, max_size=2),
    )
    def begin(self, dispatch: str, budgets: list[int | None]) -> None:
        self.packs = dispatch in PACKERS
        packing = PackingOptions(budgets=MigrationBudgets(engine_bytes=budgets[0], prefill_tokens=budgets[1]))
        options = ClusterOptions(dispatch=dispatch, packing=packing, **OPTIONS)  # type: ignore[arg-type]
        self.manager = Manager(options, dispatch_named(dispatch))
        self.log = io.BytesIO()
        self.writer = EventLogWriter(self.log, options)
        self.now_ns = 0
        self.requests: dict[str, ModelRequest] = {}
        self.engines: dict[str, ModelEngine] = {}
        self.processes: set[tuple[str, int]] = set()
        self.last: Counter[str] = Counter()
        self.known: set[str] = set()
        """Engines that said how large they are."""
        self.messages: list[ClusterEvent] = []
        self.migrations: dict[str, ModelMigration] = {}
        self.begun: set[str] = set()
        self.numbers = 0
        self.emit(Ticked())
        for engine in ("e0", "e2"):
            self.emit(EngineAdded(engine, SERVICES[engine]))

    # What happens

    @rule(
        engine=st.sampled_from(sorted(SERVICES)),
        change=st.sampled_from(
            ["add", "add", "find", "find", "drain", "undrain", "remove", "standby", "standby", "activate"]
        ),
        ahead=st.integers(1, 3),
    )
    def administer(self, engine: str, change: str, ahead: int) -> None:
        """An operator changes which engines are wanted; an engine may be found running."""
        if change == "add":
            self.emit(EngineAdded(engine, SERVICES[engine]))
        elif change == "find" and engine not in self.engines:
            self.find(engine, self.last[engine] + ahead)
        elif change == "drain":
            if engine in self.engines:
                self.engines[engine].draining, self.engines[engine].standby = True, ""
            self.emit(EngineDraining(engine))
        elif change == "undrain":
            if engine in self.engines and self.engines[engine].standby != "there":
                self.engines[engine].draining, self.engines[engine].standby = False, ""
            self.emit(EngineUndrained(engine))
        elif change == "standby":
            if engine in self.engines and self.may_leave(engine):
                own = self.engines[engine]
                own.draining, own.standby = False, "there" if own.state == "gone" else "going"
            self.emit(EngineDeactivated(engine))
        elif change == "activate":
            if engine in self.engines:
                self.engines[engine].standby = ""
            self.emit(EngineActivated(engine))
        elif change == "remove":
            self.remove(engine)

    @rule(
        service=st.sampled_from("ab"),
        choices=st.integers(1, 2),
        family=st.integers(0, 2),
        most=st.sampled_from([20, 20, 20, 40, 100, 200]),
    )
    def submit(self, service: str, choices: int, family: int, most: int) -> None:
        name = f"r{self.numbers}"
        self.numbers += 1
        prompt = 10 * choices
        self.requests[name] = ModelRequest(service, prompt + most, waits_since_ns=self.now_ns)
        submitted = Submitted(name, service, prompt, most, choices, (family, 10 + self.numbers))
        self.emit(submitted)
        assert self.manager.handle(submitted, self.now_ns) == []

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), output=st.none() | st.integers(0, 30))
    def end(self, data: st.DataObject, output: int | None) -> None:
        request = data.draw(st.sampled_from(list(self.requests)))
        self.leave(request)
        del self.requests[request]
        self.emit(Ended(request, output))
        self.emit(Ended(request, output))
        self.emit(Progressed(request))

    @precondition(lambda self: any(each.owner and each.attempt > 1 for each in self.requests.values()))
    @rule(data=st.data())
    def progress(self, data: st.DataObject) -> None:
        running = [name for name, each in self.requests.items() if each.owner and each.attempt > 1]
        self.progressed(data.draw(st.sampled_from(running)))

    @precondition(lambda self: self.requests)
    @rule(
        data=st.data(),
        engine=st.none() | st.sampled_from(sorted(SERVICES)),
        method=st.sampled_from(
            [MigrationMethod.LIVE, MigrationMethod.LIVE, MigrationMethod.STOP, MigrationMethod.TOKENS]
        ),
    )
    def move(self, data: st.DataObject, engine: str | None, method: MigrationMethod) -> None:
        """A request is to move; its engines say what they say, at any time."""
        self.emit(MigrationWanted(data.draw(st.sampled_from(list(self.requests))), engine, method))

    @precondition(lambda self: any(each.owner for each in self.requests.values()))
    @rule(data=st.data(), answers=st.integers(0, 3), comes=st.sampled_from(["nothing", "token", "failure"]))
    def move_far(self, data: st.DataObject, answers: int, comes: str) -> None:
        """A request moves without delay, up to some point."""
        request = data.draw(st.sampled_from([name for name, each in self.requests.items() if each.owner]))
        self.emit(MigrationWanted(request, None, MigrationMethod.LIVE))
        for migration in [name for name, move in self.migrations.items() if move.request == request]:
            for answer in (MigrationReserved, MigrationCopied, MigrationStopped)[:answers]:
                self.emit(answer(migration))
            if answers == 3 and comes == "token" and self.requests[request].attempt > 1:
                self.progressed(request)
            elif comes == "failure":
                self.emit(MigrationFailed(migration, "some of its KV was lost"))

    @rule(tokens=st.lists(st.integers(0, 25), max_size=12))
    def begin_epoch(self, tokens: list[int]) -> None:
        self.emit(EpochBegan(dict(zip(self.requests, tokens, strict=False))))

    @precondition(lambda self: self.messages)
    @rule(data=st.data(), stays=st.booleans())
    def deliver(self, data: st.DataObject, stays: bool) -> None:
        """A message arrives, perhaps not for the last time."""
        at = data.draw(st.integers(0, len(self.messages) - 1))
        self.arrive(self.messages[at] if stays else self.messages.pop(at))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), hung=st.sampled_from(["", "", "", "a step stands still"]))
    def beat(self, data: st.DataObject, hung: str) -> None:
        engine, incarnation = data.draw(st.sampled_from(sorted(self.processes)))
        self.messages.append(EngineHeartbeat(engine, incarnation, hung))

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), cpu_s=st.sampled_from([0.0, 0.02, 5.0, 1e4]), read_bytes=st.integers(0, 3))
    def work(self, data: st.DataObject, cpu_s: float, read_bytes: int) -> None:
        """What a process uses is seen from outside, and it may tell how far it is with loading."""
        process = data.draw(st.sampled_from(sorted(self.processes)))
        self.messages.append(EngineProcessUsage(*process, cpu_s, read_bytes))
        if data.draw(st.booleans()):
            self.messages.append(EngineLoading(*process, "loading"))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """A process dies in a step of some of its requests."""
        process = data.draw(st.sampled_from(sorted(self.processes)))
        self.processes.remove(process)
        there = [name for name, each in self.requests.items() if each.owner == process]
        suspects = data.draw(st.lists(st.sampled_from([*there, "r0", "nobody"]), unique=True))
        self.messages.append(EngineEnded(*process, "killed", tuple(suspects)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), times=st.integers(1, 5), all_suspect=st.booleans())
    def poison(self, data: st.DataObject, times: int, all_suspect: bool) -> None:
        """Engines die of a request, one after the other; they are soon back, and nothing comes late."""
        poison = data.draw(st.sampled_from(list(self.requests)))
        for _ in range(times):
            owner = self.requests[poison].owner if poison in self.requests else None
            if owner in self.processes:
                self.processes.remove(owner)
                there = [name for name, each in self.requests.items() if each.owner == owner]
                self.arrive(EngineEnded(*owner, "killed", tuple(there) if all_suspect else (poison,)))
            self.tick(16, True)
            for message in [each for each in self.messages if isinstance(each, EngineReady)]:
                self.messages.remove(message)
                self.arrive(message)

    @rule(quarters=st.integers(1, 30), beats=st.sampled_from([True, True, False]))
    def tick(self, quarters: int, beats: bool) -> None:
        for _ in range(quarters):
            self.now_ns += SECOND // 4
            for process in sorted(self.processes) if beats else ():
                self.emit(EngineHeartbeat(*process))
            self.emit(Ticked())

    @rule(hours=st.integers(0, 2))
    def sleep(self, hours: int) -> None:
        self.now_ns += hours * 3600 * SECOND
        self.emit(Ticked())

    # What must be true

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        for name, request in self.requests.items():
            assert self.manager.owner(name) == (request.owner and request.owner[0])
        for service in "ab":
            waiting = [each for each in self.requests.values() if each.service == service and not each.owner]
            assert self.manager.waiting(service) == len(waiting)
            assert self.manager.service(service).ready == len(self.ready(service))
            # At most one engine for each request in quarantine is closed to others.
            alone = sum(each.alone for each in self.requests.values())
            largest = max([KV_TOKENS[name] for name in self.ready(service)], default=0)
            for each in waiting:
                able = self.able(each)
                if self.packs:
                    # The largest has room for every request when it is idle.
                    able = [name for name in able if KV_TOKENS[name] == largest and self.is_idle(name)]
                assert each.alone or len(able) <= alone
        for each in self.manager.engines:
            kept = [move for move in self.migrations.values() if move.keeper == each.name]
            assert each.leases == len(kept)
        assert {each.name: each.incarnation for each in self.manager.engines} == {
            name: engine.incarnation for name, engine in self.engines.items()
        }

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for engine in SERVICES:
            self.remove(engine)
            self.emit(EngineAdded(engine, SERVICES[engine]))
        assert not self.migrations
        self.messages.clear()
        for name, each in self.engines.items():
            self.arrive(ready(name, each.incarnation))
        for _ in range(len(self.requests)):
            for name in [name for name, each in self.requests.items() if each.alone and each.owner]:
                self.progressed(name)
        while self.packs and self.requests:
            request = next(name for name, each in self.requests.items() if each.owner)
            self.leave(request)
            del self.requests[request]
            self.emit(Ended(request, 3))
        assert all(each.owner for each in self.requests.values())
        replay(self.log.getvalue().splitlines(keepends=True))

    # The model

    def ready(self, service: str) -> list[str]:
        return [
            name
            for name, engine in self.engines.items()
            if service in SERVICES[name] and engine.state == "ready" and engine.active
        ]

    def may_leave(self, engine: str) -> bool:
        """Whether an engine is not on standby already, and another is active for each of its services."""
        others = [SERVICES[name] for name, each in self.engines.items() if name != engine and each.active]
        elsewhere = all(any(service in other for other in others) for service in SERVICES[engine])
        return not self.engines[engine].standby and elsewhere

    def able(self, request: ModelRequest) -> list[str]:
        """Engines that a request may go to: those with room for it, or all if none has and none comes."""
        ready = self.ready(request.service)
        roomy = [name for name in ready if request.longest <= KV_TOKENS[name]]
        awaited = [
            name
            for name, engine in self.engines.items()
            if request.service in SERVICES[name]
            and engine.active
            and (name not in self.known or request.longest <= KV_TOKENS[name])
        ]
        return roomy if roomy or awaited else ready

    def is_idle(self, engine: str) -> bool:
        """Whether an engine has nothing, and nothing is on its way to it."""
        kept = any(move.keeper == engine for move in self.migrations.values())
        return not self.engines[engine].requests and not kept

    def find(self, engine: str, incarnation: int) -> None:
        self.processes.add((engine, incarnation))
        self.messages.append(ready(engine, incarnation))
        self.last[engine] = incarnation
        self.engines[engine] = ModelEngine(incarnation)
        self.emit(EngineFound(engine, incarnation, SERVICES[engine]))

    def remove(self, engine: str) -> None:
        self.engines.pop(engine, None)
        self.known.discard(engine)
        self.forget_kept(engine)
        there = [name for name, each in self.requests.items() if each.owner and each.owner[0] == engine]
        actions = self.emit(EngineRemoved(engine))
        assert all(Withdraw(request) in actions for request in there)
        self.processes = {process for process in self.processes if process[0] != engine}

    def progressed(self, request: str) -> None:
        each = self.requests[request]
        each.deaths = each.deaths_alone = 0
        each.alone = False
        self.emit(Progressed(request))

    def leave(self, request: str) -> None:
        each = self.requests[request]
        if each.owner and each.owner[0] in self.engines:
            self.engines[each.owner[0]].requests.remove(request)
        each.owner = None
        each.waits_since_ns = self.now_ns

    def arrive(self, message: ClusterEvent) -> None:
        """Note what a message about an engine means, if it is not out of date, and tell it."""
        if not isinstance(message, EngineReady | EngineHeartbeat | EngineEnded):
            self.emit(message)
            return
        engine = self.engines.get(message.engine)
        if engine is not None and engine.incarnation == message.incarnation and engine.state != "gone":
            if isinstance(message, EngineReady):
                self.known.add(message.engine)
                if engine.state == "loading":
                    engine.state = "ready"
            if isinstance(message, EngineEnded):
                engine.state = "gone"
                engine.standby = "there" if engine.standby else ""
                self.bury(engine, message.suspects)
                self.forget_kept(message.engine)
        self.emit(message)

    def bury(self, engine: ModelEngine, suspects: tuple[str, ...]) -> None:
        for request in list(engine.requests):
            each = self.requests[request]
            self.leave(request)
            if request in suspects:
                each.deaths += 1
                each.deaths_alone += each.alone
                each.alone = each.deaths >= 2

    def forget_kept(self, engine: str) -> None:
        """An engine is gone, with what it kept of requests that had left it."""
        for move in self.migrations.values():
            if move.keeper == engine == move.source:
                move.keeper = None

    def emit(self, event: ClusterEvent) -> list[ClusterAction]:
        """Tell the manager, and do what it decides."""
        actions = self.manager.handle(event, self.now_ns)
        self.writer.write(self.now_ns, event, actions)
        for action in actions:
            self.carry_out(action)
        return actions

    def carry_out(self, action: ClusterAction) -> None:
        if isinstance(action, StartEngine):
            assert action.incarnation == self.last[action.engine] + 1
            assert action.engine not in self.engines or self.engines[action.engine].state == "gone"
            assert action.engine not in self.engines or self.engines[action.engine].active
            self.last[action.engine] = action.incarnation
            self.engines[action.engine] = ModelEngine(action.incarnation)
            self.processes.add((action.engine, action.incarnation))
            self.messages.append(ready(action.engine, action.incarnation))
        elif isinstance(action, StopEngine):
            assert self.engines[action.engine].standby == "going"
            assert self.is_idle(action.engine)
            self.carry_out(KillEngine(action.engine, action.incarnation, "it goes to standby"))
        elif isinstance(action, KillEngine):
            process = (action.engine, action.incarnation)
            if action.engine in self.engines:
                engine = self.engines[action.engine]
                assert engine.incarnation == action.incarnation
                assert engine.state in ("loading", "ready")
                engine.state = "killed"
                if process in self.processes:
                    self.messages.append(EngineEnded(*process, "killed by the manager"))
            self.processes.discard(process)
        elif isinstance(action, Dispatch):
            self.dispatched(action)
        elif isinstance(action, Withdraw):
            self.leave(action.request)
        elif isinstance(action, Reserve | Export | Commit | Abort | MigrationEnded):
            self.moved(action)
        elif isinstance(action, Release):
            move = self.migrations[action.migration]
            assert action.engine == move.source
            if move.keeper == move.source:
                move.keeper = None
        elif isinstance(action, Refuse):
            each = self.requests.pop(action.request)
            assert each.owner is None
            if action.kind is RefusalKind.POISON:
                assert each.deaths_alone == 2
            else:
                assert not self.able(each)
                assert self.now_ns - each.waits_since_ns >= 20 * SECOND

    def dispatched(self, action: Dispatch) -> None:
        each, engine = self.requests[action.request], self.engines[action.engine]
        assert each.owner is None
        assert each.deaths_alone < 2
        assert action.engine in self.able(each)
        assert action.incarnation == engine.incarnation
        kept = any(move.keeper == action.engine for move in self.migrations.values())
        assert not (each.alone and (engine.requests or kept))
        self.own(action.request, action.engine, action.attempt)

    def moved(self, action: Reserve | Export | Commit | Abort | MigrationEnded) -> None:
        if isinstance(action, MigrationEnded):
            if action.method is MigrationMethod.TOKENS:
                return
            del self.migrations[action.migration]
            if action.outcome is MigrationOutcome.DONE:
                assert self.requests[action.request].owner
            return
        each = self.requests[action.request]
        if isinstance(action, Reserve):
            assert action.migration not in self.begun
            assert all(move.request != action.request for move in self.migrations.values())
            assert each.owner
            assert self.engines[each.owner[0]].state == "ready"
            source, target = each.owner[0], action.engine
            assert source != target
            assert target in self.able(each)
            assert KV_FORMATS[source][each.service] == KV_FORMATS[target][each.service]
            assert not each.deaths
            assert not each.alone
            self.begun.add(action.migration)
            self.migrations[action.migration] = ModelMigration(action.request, source, target, target)
            answers = MigrationReserved(action.migration), MigrationDeclined(action.migration, "no room")
            self.messages += answers
            return
        move = self.migrations[action.migration]
        assert move.request == action.request
        if isinstance(action, Export):
            assert (action.engine, action.to) == (move.source, move.target)
            self.messages += MigrationCopied(action.migration), MigrationStopped(action.migration)
            self.messages.append(MigrationNotExported(action.migration, "it waits"))
        elif isinstance(action, Commit):
            assert action.engine == move.target == move.keeper
            assert each.owner
            assert each.owner[0] == move.source
            self.leave(action.request)
            self.own(action.request, action.engine, action.attempt)
            assert action.engine in self.ready(each.service)
            move.keeper = move.source
            self.messages.append(MigrationFailed(action.migration, "dropped"))
        elif action.attempt is not None:
            assert action.engine == move.source == move.keeper
            assert self.engines[move.source].state == "ready"
            assert not each.alone
            if each.owner:
                assert each.owner[0] == move.target
                self.leave(action.request)
            self.own(action.request, action.engine, action.attempt)
        else:
            assert action.engine == move.source

    def own(self, request: str, engine: str, attempt: int) -> None:
        """An engine has a request from now on."""
        each, there = self.requests[request], self.engines[engine]
        assert attempt == each.attempt + 1
        assert not any(self.requests[other].alone for other in there.requests)
        each.attempt, each.owner = attempt, (engine, there.incarnation)
        there.requests.append(request)


TestManager = ManagerMachine.TestCase


@pytest.fixture(autouse=True, scope="module")
def _examples() -> None:
    TestManager.settings = settings(max_examples=examples(150), stateful_step_count=60)
