"""Two engines that keep to the messages of migrations, one request, and the real manager between them.

Everything that can happen is a choice, so that all orders can be tried. Messages between the manager and an
engine keep their order; they can be late, and the first that waits can be doubled or lost.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import ClassVar

from shoal.cluster.manager.actions import ClusterAction, MigrationEnded, MigrationOutcome
from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineEnded,
    EngineReady,
    MigrationMethod,
    MigrationWanted,
    Progressed,
    ServiceSpeed,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.manager.migration_state import MigrationState
from shoal.cluster.options import ClusterOptions
from shoal.cluster.router.action_runner import ActionRunner
from shoal.cluster.router.migration_runner import MigrationRunner
from shoal.core import FinishReason, Request, ResumeState, SamplingParams, TokenEvent
from shoal.engine import wire
from shoal.engine.migration import wire as migration_wire

PROMPT = [7, 8]
TOKENS = 2
"""Of the request's output."""
NAMES = ("S", "D")
SECOND = 1_000_000_000
LOSABLE = (
    migration_wire.Reserve,
    migration_wire.Export,
    migration_wire.Commit,
    migration_wire.Reserved,
    migration_wire.Declined,
    migration_wire.Copied,
    migration_wire.Stopped,
    migration_wire.NotExported,
    migration_wire.Failed,
)
"""What is made good for if it is lost alone. A connection that loses anything else ends."""
Choice = tuple[str, str]
"""What happens, and to whom."""


@dataclass
class Process:
    """An engine's process: how far it is with each request."""

    name: str
    incarnation: int
    transfer: str = "kv"
    alive: bool = True
    end_reported: bool = False
    """Whether its end is known."""
    running: dict[str, int] = field(default_factory=dict)
    """Output tokens, by the request's id."""
    leaving: dict[str, tuple[str, int]] = field(default_factory=dict)
    """The request and the rounds that are left, by migration."""
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    """A request that was stopped, and its output tokens."""
    leases: dict[str, int | None] = field(default_factory=dict)
    """Output tokens whose KV has come, by migration."""
    commits: dict[str, Request] = field(default_factory=dict)
    to: deque = field(default_factory=deque)
    """Messages that are on their way to it; as ``back``."""
    back: deque = field(default_factory=deque)
    kv: deque = field(default_factory=deque)
    """KV that is on its way to it: migration and output tokens."""

    def send(self, message: wire.ToEngine) -> None:
        if not self.end_reported:
            self.to.append(message)

    @property
    def keeps_nothing(self) -> bool:
        return not (self.running or self.leaving or self.held or self.leases or self.commits)


class Call:
    """Implements what the router's hands need of a call."""

    id = log_name = "r"
    service = "a"
    prompt_tokens = len(PROMPT)

    def __init__(self) -> None:
        self.engine: str | None = None
        self.attempt = 0
        self.progressed = True
        self.output_tokens = 0

    def wire_ids(self) -> list[str]:
        return [f"r-0#{self.attempt}"]

    def remaining_requests(self, now_ns: int) -> list[Request]:
        return [
            Request(
                id=self.wire_ids()[0],
                service="a",
                prompt=PROMPT,
                sampling=SamplingParams(max_tokens=TOKENS),
                output_tokens=tuple(range(self.output_tokens)),
                resume_state=ResumeState(max_new_tokens=TOKENS),
            )
        ]


class World:
    """Implements fleet and calls for the real hands of the router; ``choices`` and ``do`` are for tests."""

    taken: ClassVar[set[tuple[MigrationState | None, MigrationState | MigrationOutcome]]] = set()
    """Transitions of migrations in all worlds."""

    def __init__(self, method: MigrationMethod, rounds: int, declines: bool, waits: bool) -> None:
        self.rounds, self.declines, self.waits = rounds, declines, waits
        self.now_ns = 0
        self.call: Call | None = Call()
        self.ends = 0
        """How often the request ended."""
        self.migrations_ended: list[MigrationEnded] = []
        self.sampled: list[int] = []
        """Positions that were sampled, by anybody."""
        self.crashes = 0
        self.cancelled = False
        self.states: dict[str, MigrationState] = {}
        """Of the migrations that are not over."""
        self.engines: dict[str, Process] = {}
        options = ClusterOptions(hung_after_s=1e9, load_timeout_s=1e9, dispatch="round-robin")
        manager = Manager(options, dispatch_named("round-robin"))
        self.manager = manager
        self.migration_runner = MigrationRunner(self, self, self.emit, self.clock)  # type: ignore[arg-type]
        self.runner = ActionRunner(
            manager,
            self,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self.migration_runner,
            clock=self.clock,
            on_decision=self.note,
        )
        self.emit(Ticked())
        for name in NAMES:
            self.emit(EngineAdded(name, ("a",)))
            self.make_ready(name)
        self.emit(Submitted("r", "a", len(PROMPT), TOKENS))
        self.deliver("S")
        self.emit(MigrationWanted("r", "D", method))

    # What the router's hands need

    def clock(self) -> int:
        return self.now_ns

    def emit(self, event: ClusterEvent) -> None:
        self.runner.process(event)

    def note(self, now_ns: int, event: ClusterEvent, actions: list[ClusterAction]) -> None:
        before = self.states
        moves = self.manager._migrations._active.values()
        self.states = {move.id: move.state for move in moves if move.state is not None}
        for name, state in self.states.items():
            if state is not before.get(name):
                self.taken.add((before.get(name), state))
        for action in actions:
            if isinstance(action, MigrationEnded):
                self.migrations_ended.append(action)
                if action.migration in before:
                    self.taken.add((before[action.migration], action.outcome))

    def get(self, request: str) -> Call | None:
        return self.call

    def assign(self, call: Call, engine: str, attempt: int, *, with_kv: bool = False) -> None:
        call.engine, call.attempt, call.progressed = engine, attempt, attempt == 1

    def withdraw(self, call: Call) -> None:
        if call.engine is not None:
            self.send(call.engine, wire.Cancel(call.wire_ids()))
            call.engine = None

    def start_engine(self, name: str, incarnation: int, services) -> None:
        self.engines[name] = Process(name, incarnation)

    def kill_engine(self, name: str, incarnation: int, why: str) -> None:
        raise AssertionError(f"nobody is to be killed: {why}")

    def send(self, engine: str, message: wire.ToEngine) -> None:
        self.engines[engine].send(message)

    def kill_inconsistent(self, engine: str, why: str) -> None:
        raise AssertionError(f"{engine} was distrusted: {why}")

    # What can happen

    def choices(self, faults: int) -> list[Choice]:
        """What can happen now; without faults: only what does where nothing fails."""
        found: list[Choice] = []
        for name, process in self.engines.items():
            if process.alive:
                found += [("deliver", name)] * bool(process.to)
                found += [("kv", name)] * bool(process.kv)
                found += [("sample", name)] * bool(process.running)
                found += [("copy", name)] * bool(process.leaving)
                found += [("join", name)] * bool(self._joinable(process))
            if not process.end_reported:
                found += [("hear", name)] * bool(process.back)
            if not process.alive and not process.end_reported:
                found.append(("end", name))
            if faults:
                found += self._faults(name, process)
        if faults:
            found.append(("tick", "5"))
            if self.call is not None:
                found.append(("cancel", ""))
        return found

    def _faults(self, name: str, process: Process) -> list[Choice]:
        found: list[Choice] = []
        if process.alive:
            found.append(("crash", name))
        for queue in ("to", "back", "kv"):
            waiting = getattr(process, queue)
            if not waiting:
                continue
            if queue == "kv" or isinstance(waiting[0], migration_wire.ToEngine | migration_wire.FromEngine):
                found.append((f"double {queue}", name))
            if queue == "kv" or isinstance(waiting[0], LOSABLE):
                found.append((f"lose {queue}", name))
        return found

    def do(self, choice: Choice) -> None:
        """Let one thing happen."""
        what, name = choice
        if what == "tick":
            self.now_ns += int(name) * SECOND
            self.emit(Ticked())
            return
        if what == "cancel":
            assert self.call is not None
            self.cancelled = True
            self.withdraw(self.call)
            self._over(None)
            return
        process = self.engines[name]
        match what.split():
            case ["deliver"]:
                self.deliver(name)
            case ["kv"]:
                migration, tokens = process.kv.popleft()
                if migration in process.leases:
                    process.leases[migration] = tokens
            case ["sample"]:
                self._sample(process)
            case ["copy"]:
                self._copy(process)
            case ["join"]:
                migration = self._joinable(process)[0]
                tokens, request = process.leases.pop(migration), process.commits.pop(migration)
                assert tokens == len(request.output_tokens)
                process.running[request.id] = tokens
            case ["hear"]:
                self._hear(name, process.back.popleft())
            case ["crash"]:
                process.alive = False
                self.crashes += 1
            case ["end"]:
                self._end(process)
            case ["double", queue]:
                getattr(process, queue).appendleft(getattr(process, queue)[0])
            case ["lose", queue]:
                getattr(process, queue).popleft()

    def finish(self) -> None:
        """Let everything happen that is still to happen, without faults, until the request has ended."""
        for _ in range(300):
            choices = self.choices(0)
            if choices:
                self.do(choices[0])
                self.check()
                continue
            for name, process in self.engines.items():
                if process.incarnation > 1 and not process.end_reported and self._loads(name):
                    self.make_ready(name)
                    break
            else:
                if self.call is None and all(process.alive for process in self.engines.values()):
                    return
                self.do(("tick", "5"))
        raise AssertionError("the request does not end")

    # What must be true

    def check(self) -> None:
        """At every moment."""
        samplers = [
            (process.name, request)
            for process in self.engines.values()
            if process.alive
            for request in process.running
            if not any(isinstance(message, wire.Cancel) and request in message.ids for message in process.to)
        ]
        assert len(samplers) <= 1, samplers
        assert self.ends <= 1

    @property
    def samples_once(self) -> bool:
        """Whether each token is to be sampled once: no engine died, no client left, no KV was recomputed."""
        recomputed = any(ended.method is MigrationMethod.TOKENS for ended in self.migrations_ended)
        return not (self.crashes or self.cancelled or recomputed)

    def check_end(self) -> None:
        """When nothing happens any more."""
        assert not self.samples_once or sorted(self.sampled) == list(range(TOKENS))
        assert self.ends == 1
        assert self.migrations_ended
        assert len({ended.migration for ended in self.migrations_ended}) == len(self.migrations_ended)
        for process in self.engines.values():
            assert process.keeps_nothing, process
        assert all(engine.leases == engine.requests == 0 for engine in self.manager.engines)

    # Engines

    def make_ready(self, name: str) -> None:
        speeds = {"a": ServiceSpeed(1e-3, 1e-2)}
        self.emit(EngineReady(name, self.engines[name].incarnation, speeds, {"a": "fp32"}))

    def _loads(self, name: str) -> bool:
        return any(engine.name == name and engine.state == "loading" for engine in self.manager.engines)

    def deliver(self, name: str) -> None:
        """A message arrives at an engine."""
        process = self.engines[name]
        message = process.to.popleft()
        match message:
            case wire.Submit():
                [request] = message.to_requests()
                process.running[request.id] = request.num_output_tokens
            case wire.Cancel():
                for request_id in message.ids:
                    process.running.pop(request_id, None)
                    for migration, request in list(process.commits.items()):
                        if request.id == request_id:
                            del process.commits[migration], process.leases[migration]
            case migration_wire.Reserve():
                self._reserve(process, message)
            case migration_wire.Export():
                known = message.migration in process.leaving or message.migration in process.held
                if not known:
                    process.leaving[message.migration] = (
                        message.request_id,
                        self.rounds if message.live else 0,
                    )
            case migration_wire.Commit():
                self._commit(process, message)
            case migration_wire.Abort():
                process.leaving.pop(message.migration, None)
                if message.migration in process.held:
                    request_id, tokens = process.held.pop(message.migration)
                    process.running[message.request_id or request_id] = tokens
            case migration_wire.Release():
                process.leaving.pop(message.migration, None)
                process.held.pop(message.migration, None)
            case migration_wire.Drop():
                process.leases.pop(message.migration, None)
                process.commits.pop(message.migration, None)
                if message.request_id is not None and message.request_id not in process.running:
                    process.back.append(migration_wire.Failed(message.migration, "dropped"))

    def _reserve(self, process: Process, message: migration_wire.Reserve) -> None:
        if self.declines:
            process.back.append(migration_wire.Declined(message.migration, "no room"))
        else:
            process.leases.setdefault(message.migration, None)
            process.back.append(migration_wire.Reserved(message.migration))

    def _commit(self, process: Process, message: migration_wire.Commit) -> None:
        if message.migration in process.leases:
            process.commits[message.migration] = message.request
        elif message.request.id not in process.running:
            process.back.append(migration_wire.Failed(message.migration, "unknown"))

    def _joinable(self, process: Process) -> list[str]:
        return [migration for migration in process.commits if process.leases[migration] is not None]

    def _sample(self, process: Process) -> None:
        [(request_id, position)] = process.running.items()
        self.sampled.append(position)
        finish = None
        process.running[request_id] += 1
        if position + 1 == TOKENS:
            finish = FinishReason.LENGTH
            del process.running[request_id]
        event = TokenEvent(request_id, (position,), finish=finish, position=position)
        process.back.append(wire.Stepped([event]))

    def _copy(self, process: Process) -> None:
        [(migration, (request_id, rounds))] = process.leaving.items()
        if request_id not in process.running or self.waits:
            del process.leaving[migration]
            process.back.append(migration_wire.NotExported(migration, "it does not run"))
        elif rounds:
            process.leaving[migration] = request_id, rounds - 1
            process.back.append(migration_wire.Copied(migration, 1))
        else:
            del process.leaving[migration]
            tokens = process.running.pop(request_id)
            process.held[migration] = request_id, tokens
            target = self.engines["D"]
            if target.alive:
                target.kv.append((migration, tokens))
            computed = len(PROMPT) + tokens - 1
            state = ResumeState(max_new_tokens=TOKENS)
            process.back.append(migration_wire.Stopped(migration, tokens, computed, state))

    # The router's ears

    def _hear(self, name: str, message: wire.FromEngine) -> None:
        if isinstance(message, wire.Stepped):
            for event in message.events:
                self._take(event)
        else:
            self.migration_runner.handle(name, message)

    def _take(self, event: TokenEvent) -> None:
        call = self.call
        if call is None or event.request_id not in call.wire_ids() or call.engine is None:
            return
        assert event.position == call.output_tokens, "lost or doubled"
        call.output_tokens += 1
        if not call.progressed:
            call.progressed = True
            self.emit(Progressed("r"))
        if event.finish is not None:
            self._over(call.output_tokens)

    def _over(self, output_tokens: int | None) -> None:
        self.call = None
        self.ends += 1
        self.emit(Ended("r", output_tokens))

    def _end(self, process: Process) -> None:
        process.end_reported = True
        process.to.clear()
        process.back.clear()
        if self.call is not None and self.call.engine == process.name:
            self.call.engine = None
        suspects = ("r",) if process.running else ()
        self.emit(EngineEnded(process.name, process.incarnation, "killed", suspects))
