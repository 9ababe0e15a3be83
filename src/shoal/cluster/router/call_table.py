"""The table of unfinished calls: routes engines' tokens to streams, and reports progress and ends."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from itertools import islice

from shoal.cluster.manager.events import ClusterEvent, Ended, Progressed, SliceEnded, WeightsFailed
from shoal.cluster.router.call import Call
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.router.recovery_log import RecoveryLog
from shoal.cluster.status import RequestStatus, RequestTable
from shoal.core import (
    FinishReason,
    InvalidRequest,
    QueueFull,
    ServiceUnavailable,
    SLOExpired,
    TokenEvent,
    has_goal,
    met,
)
from shoal.engine import wire
from shoal.frontend.reader import ChoiceReader
from shoal.frontend.timeline import Phase

_log = logging.getLogger(__name__)
# First tokens that are remembered, to estimate the rate of the queue.
_RATE_WINDOW = 64
_LONGEST_RETRY_S = 60.0
# Ended requests that are remembered, to show them.
_MAX_ENDED = 200


class CallTable:
    """Unfinished calls by id, and their choices by wire id.

    emit: takes events for the manager. clock: nanoseconds. on_finish: called with a call that finished
    normally, and the mean output length of its choices. on_end: called with a call and one of its choices
    that ends, before it is forgotten.
    """

    def __init__(
        self,
        fleet: Fleet,
        emit: Callable[[ClusterEvent], None],
        clock: Callable[[], int],
        on_finish: Callable[[Call, int], None] = lambda call, output_tokens: None,
        on_end: Callable[[Call, int, FinishReason], None] = lambda call, choice, finish: None,
    ) -> None:
        self._fleet = fleet
        self._emit = emit
        self._clock = clock
        self._on_finish = on_finish
        self._on_end = on_end
        self._calls: dict[str, Call] = {}
        self._readers: dict[str, tuple[Call, ChoiceReader]] = {}  # of choices that an engine has
        self._waiting = 0
        self._first_tokens_ns: deque[int] = deque(maxlen=_RATE_WINDOW)
        self._ended: deque[RequestStatus] = deque(maxlen=_MAX_ENDED)
        self.recovery_log = RecoveryLog()
        self.emptied = asyncio.Event()
        """Set when the last call ends."""

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, call_id: str) -> Call | None:
        """An unfinished call, or None."""
        return self._calls.get(call_id)

    def all(self) -> Sequence[Call]:
        return list(self._calls.values())

    @property
    def waiting(self) -> int:
        """Number of choices without a first token."""
        return self._waiting

    def add(self, call: Call) -> None:
        self._calls[call.id] = call
        self._waiting += call.waiting
        self.emptied.clear()

    def assign(self, call: Call, engine: str, attempt: int, *, with_kv: bool = False) -> None:
        """Assign a call to an engine. with_kv: it migrates there with its KV."""
        self._forget(call)
        call.engine, call.attempt = engine, attempt
        call.rested.clear()
        if call.waits_for_load_ns is not None:
            call.stream.load_ns = self._clock() - call.waits_for_load_ns
            call.waits_for_load_ns = None
        for choice, reader in call.unfinished.items():
            self._readers[call.wire_id(choice)] = call, reader
        call.progressed = attempt == 1
        call.begin_phase(Phase.DECODE if with_kv else Phase.WAITING, self._clock())
        begin = "with its KV" if with_kv else f"from token {call.output_tokens}"
        _log.debug("%s: attempt %d on engine %s, %s", call.log_name, attempt, engine, begin)

    def withdraw(self, call: Call) -> None:
        """Cancel a call at its engine, if it has one."""
        if call.engine is not None:
            self._fleet.send(call.engine, wire.Cancel(call.wire_ids()))
            self._forget(call)
            call.engine = None
            call.begin_phase(Phase.WAITING, self._clock())

    def engine_ended(self, engine: str, reason: str) -> None:
        """An engine ended; its calls wait."""
        calls = [call for call in self._calls.values() if call.engine == engine]
        self.recovery_log.engine_ended(engine, reason, [call.id for call in calls], self._clock())
        for call in calls:
            self._forget(call)
            call.engine, call.lost_engine = None, True
            call.begin_phase(Phase.WAITING, self._clock())

    def stepped(self, events: Sequence[TokenEvent]) -> None:
        now_ns = self._clock()
        for event in events:
            self._take(event, now_ns)

    def transitioned(self, transitions: Sequence[wire.Transition]) -> None:
        """An engine has admitted or preempted requests."""
        now_ns = self._clock()
        for transition in transitions:
            if (found := self._readers.get(transition.request_id)) is not None:
                call, reader = found
                timeline = call.timelines[reader.choice]
                if transition.runs and timeline.phase is Phase.DECODE:
                    continue  # it came with its KV
                phase = Phase.PREFILL if transition.runs else Phase.PREEMPTED
                timeline.begin(phase, call.engine, now_ns - transition.age_ns)

    def requests(self, most: int, services: Set[str] | None = None) -> RequestTable:
        """Unfinished requests, the oldest first, and the last that ended; at most ``most`` of each.

        services: of these alone; None: of all.
        """
        calls = [call for call in self._calls.values() if services is None or call.service in services]
        unfinished = ((call, choice) for call in calls for choice in call.unfinished)
        shown = [call.request_status(choice) for call, choice in islice(unfinished, most)]
        left_out = sum(len(call.unfinished) for call in calls) - len(shown)
        ended = [request for request in self._ended if services is None or request.service in services]
        return RequestTable(shown, ended[-most:], left_out)

    def refused(self, message: wire.Refused) -> None:
        """An engine has refused a call."""
        if (found := self._readers.get(message.request_id)) is None:
            return
        error: Exception = InvalidRequest(message.message, message.param, message.code)
        if message.retry_after_s is not None:
            error = QueueFull(message.message, message.retry_after_s)
        self.end(found[0], error)

    def accepted(self, message: wire.Accepted) -> None:
        """An engine has accepted the grammar of a call."""
        if (found := self._readers.get(message.request_id)) is not None:
            found[0].accept()

    def end(self, call: Call, error: Exception) -> None:
        """End a call with an error."""
        self.recovery_log.failed(call.id)
        if not isinstance(error, InvalidRequest) and has_goal(call.slo):
            call.met = False
        self.cancel(call, _finish_of(error), str(error))
        call.accept(error)
        call.stream.end(error)

    def cancel(self, call: Call, finish: FinishReason = FinishReason.CANCELLED, why: str = "") -> None:
        """Cancel the unfinished choices of a call; its stream gets nothing more.

        finish, why: how they end.
        """
        if call.id not in self._calls:
            return
        self._waiting -= call.waiting
        now_ns = self._clock()
        for choice in call.unfinished:
            self._note_end(call, choice, finish, now_ns, why)
        self.withdraw(call)
        call.unfinished.clear()
        self.recovery_log.cancelled(call.id)
        self._remove(call)

    def retry_after_s(self, excess: int) -> float:
        """Estimated seconds until ``excess`` choices have left the queue."""
        times = self._first_tokens_ns
        if len(times) < 2:
            return 1.0
        rate = len(times) / max(1e-3, (self._clock() - times[0]) / 1e9)
        return min(_LONGEST_RETRY_S, max(1.0, excess / rate))

    def _take(self, event: TokenEvent, now_ns: int) -> None:
        found = self._readers.get(event.request_id)
        if found is None:
            # It has ended, or is on another engine.
            return
        call, reader = found
        assert call.engine is not None
        if event.finish is FinishReason.REFUSED:
            self.end(call, SLOExpired(event.error or "", self.retry_after_s(self._waiting)))
            return
        if event.finish is FinishReason.UNLOADED:
            self._give_up(call, event.error or "")
            return
        rests = event.finish is FinishReason.SLICE
        if rests:
            event = event._replace(finish=None)
        made = len(reader.output)
        if event.tokens and event.position != made:
            why = f"{call.log_name} got token {event.position} after {made} tokens"
            self._fleet.kill_inconsistent(call.engine, why)
            return
        delta = reader.read(event, now_ns)
        if not made and reader.output:
            self._waiting -= 1
            self._first_tokens_ns.append(now_ns)
        if event.tokens:
            call.timelines[reader.choice].begin(Phase.DECODE, call.engine, now_ns)
        progressed = not call.progressed and bool(event.tokens)
        if progressed:
            call.progressed = True
            if call.lost_engine:
                call.lost_engine = False
                self.recovery_log.progressed(call.id, call.service, call.engine, now_ns)
        call.stream.push(delta)
        if delta.finish is not None:
            ended_by_engine = rests or event.finish is not None
            self._finish(call, reader, delta.finish, delta.error, ended_by_engine=ended_by_engine)
        # Last, since the manager may decide about this call.
        if progressed and call.id in self._calls:
            self._emit(Progressed(call.id))
        if rests and self._readers.pop(event.request_id, None) is not None:
            call.rested.add(reader.choice)
            call.timelines[reader.choice].begin(Phase.WAITING, call.engine, now_ns)
            self._end_slice(call)

    def _end_slice(self, call: Call) -> None:
        """A call waits for its next batch once the slices of all its unfinished choices are over."""
        if call.rested and len(call.rested) == len(call.unfinished):
            call.rested.clear()
            call.engine = None
            call.begin_phase(Phase.WAITING, self._clock())
            shortest = min(reader.output_tokens for reader in call.unfinished.values())
            self._emit(SliceEnded(call.id, shortest))

    def _give_up(self, call: Call, error: str) -> None:
        """The engine of a call cannot load its weights: another may take it."""
        _log.warning("%s cannot go on at engine %s: %s", call.log_name, call.engine, error)
        self._forget(call)
        self._emit(WeightsFailed(call.id, error))

    def _finish(
        self,
        call: Call,
        reader: ChoiceReader,
        reason: FinishReason,
        error: str | None,
        *,
        ended_by_engine: bool,
    ) -> None:
        """Finish a choice. ended_by_engine: the engine sent the finish."""
        wire_id = call.wire_id(reader.choice)
        self._note_end(call, reader.choice, reason, self._clock(), error or "")
        del call.unfinished[reader.choice], self._readers[wire_id]
        self._waiting -= not reader.started
        if not ended_by_engine and call.engine is not None:
            self._fleet.send(call.engine, wire.Cancel([wire_id], complete=True))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            call.finished_tokens.append(reader.output_tokens)
        if reason is not FinishReason.INVALID:
            self._judge(call, reader)
        if not call.unfinished:
            if reason in (FinishReason.ERROR, FinishReason.INVALID):
                self.recovery_log.failed(call.id)
            elif call.engine is not None:
                self.recovery_log.recovered(call.id, call.engine, self._clock())
            self._remove(call)
            call.stream.end()
        else:
            self._end_slice(call)

    def _judge(self, call: Call, reader: ChoiceReader) -> None:
        """Note whether a finished choice met its goals; one without a record missed them, if it has any."""
        record = reader.record()
        outcome = False if record is None else met(record, call.slo)
        if outcome is not None and has_goal(call.slo):
            call.met = outcome and call.met is not False

    def _note_end(self, call: Call, choice: int, finish: FinishReason, now_ns: int, why: str) -> None:
        """Remember how an unfinished choice ends."""
        call.timelines[choice].end(finish, now_ns, why)
        self._ended.append(call.request_status(choice))
        self._on_end(call, choice, finish)

    def _forget(self, call: Call) -> None:
        """Ignore further messages about a call in its present attempt."""
        for wire_id in call.wire_ids():
            self._readers.pop(wire_id, None)

    def _remove(self, call: Call) -> None:
        del self._calls[call.id]
        finished = call.finished_tokens
        mean = sum(finished) // len(finished) if finished else None
        if mean:
            self._on_finish(call, mean)
        self._emit(Ended(call.id, mean, call.met))
        if not self._calls:
            self.emptied.set()


def _finish_of(error: Exception) -> FinishReason:
    """How a call ends with an error."""
    if isinstance(error, InvalidRequest):
        return FinishReason.INVALID
    refused = isinstance(error, (QueueFull, ServiceUnavailable))
    return FinishReason.REFUSED if refused else FinishReason.ERROR
