"""One service's requests inside the scheduler."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.core import NO_GOALS, SLO, LengthPredictor
from shoal.forecast import LearnedLengths, LengthHistory, ServiceMonitor, SharedBlocks
from shoal.kvcache import ServiceLayout
from shoal.schedule.belief import Peaks
from shoal.schedule.cohort import Cohort
from shoal.schedule.columns import Columns
from shoal.schedule.crowd import Crowd
from shoal.schedule.larger_crowd import LargerCrowd
from shoal.schedule.members import Members
from shoal.schedule.queue import WaitingQueue
from shoal.schedule.running import Running
from shoal.schedule.sharing import SharedPrefixes
from shoal.schedule.stats import Observed
from shoal.schedule.tracked import BY_SEQUENCE, Tracked


@dataclass(frozen=True, slots=True)
class ServiceTraits:
    """What is known of a service that orders may use.

    mean_s, deviation_s: execution time of its requests (the steps they took part in), as learned online.
    mean_output_tokens: of its finished requests; None before the first. quota: decode steps in a round.
    alone_s: execution time of the mean request when it runs alone; None where nobody said it.
    """

    mean_s: float
    deviation_s: float
    mean_output_tokens: float | None = None
    quota: int = 8
    alone_s: float | None = None


class GroupView(Protocol):
    """What policies may read of a service.

    waiting: without KV, by the order's rank, then by submission. running: with KV, longest admitted first.
    prefills: those of them whose known tokens are not all scheduled, in the same order. last_step: number
    of the last plan for this service, last_prefill: of the last that computed part of a prompt (-1: none
    yet). streak: how many plans for this service that were decodes only were made last without one for
    another service or a prompt between them. traits: what is known of the service.
    """

    @property
    def service(self) -> str: ...  # noqa: D102
    @property
    def waiting(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def running(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def prefills(self) -> Sequence[Tracked]: ...  # noqa: D102
    @property
    def last_step(self) -> int: ...  # noqa: D102
    @property
    def last_prefill(self) -> int: ...  # noqa: D102
    @property
    def streak(self) -> int: ...  # noqa: D102
    @property
    def traits(self) -> ServiceTraits: ...  # noqa: D102
    @property
    def columns(self) -> Columns:
        """The running requests' attributes as arrays; of use until the next change."""
        ...

    def crowd(self) -> Crowd:
        """The running requests as columns of numbers, in their order; made once after a change."""
        ...


@dataclass(frozen=True, slots=True)
class Beliefs:
    """One service's memory of its past, and what it makes of it; fed when requests arrive and end."""

    history: LengthHistory
    monitor: ServiceMonitor
    predictor: LengthPredictor

    def observed(self, now_ns: int) -> Observed:
        """Its traffic of late, and how well the learned predictor did, if it is that."""
        traffic = self.monitor.snapshot(now_ns)
        if not isinstance(self.predictor, LearnedLengths):
            return Observed(traffic=traffic)
        return Observed(
            traffic=traffic, accuracy=self.predictor.accuracy, corrections=self.predictor.corrections
        )


class Group:
    """Queue, running requests, beliefs and shared prefixes of one service.

    due_ns: when a request starves. publish: told of a running request that may have full blocks to offer to
    the prefix index, after steps that were not written to it. slo, execution_s: the service's goals, and its
    fixed execution time where known.
    rows: ``running`` itself, whose books may be behind. cohort: those of them whose are; all that have
    nothing left to prefill, or none. served_guard_ns: when the starvation guard last made a plan for it.
    earliest_due_ns: no running request starves before that. ending: so many running requests are to end at
    the update of a plan in flight, whatever it brings. in_flight: plans of this service in flight.
    """

    def __init__(
        self,
        layout: ServiceLayout,
        block_size: int,
        beliefs: Beliefs,
        due_ns: Callable[[Tracked], int],
        publish: Callable[[Tracked], None],
        *,
        slo: SLO = NO_GOALS,
        execution_s: float | None = None,
        quota: int = 8,
    ) -> None:
        self.service = layout.service
        self.layout = layout
        self.beliefs = beliefs
        self.history = beliefs.history
        self.slo = slo
        self.execution_s = execution_s
        self.waiting = WaitingQueue(due_ns)
        self._columns = Columns([])
        self.rows = self._columns.requests
        self.cohort = Cohort(block_size, publish)
        self.running = Running(self.rows, self.settle)
        self.prefills: list[Tracked] = []
        self.ending = 0
        self.last_step = -1
        self.last_prefill = -1
        self.streak = 0
        self.shared = SharedPrefixes()
        self.served_guard_ns: int | None = None
        self.earliest_due_ns = 0
        self._due_ns = due_ns
        self._quota = quota
        self._block_size = block_size
        self._peaks = Peaks()
        self._most_blocks = 0
        self.in_flight = 0
        self._begun: Sequence[Tracked] = ()
        self._members: Members | None = None
        self._shares: SharedBlocks | None = None
        self._shares_known = False
        self._crowd: Crowd | None = None

    def enter(self, one: Tracked) -> None:
        """A waiting request runs."""
        self.waiting.remove(one)
        self._columns.enter(one)
        self._most_blocks += self._most_blocks_of(one)
        self.prefills.append(one)
        self.earliest_due_ns = min(self.earliest_due_ns, self._due_ns(one))

    def leave(self, one: Tracked) -> None:
        """A running request runs no longer."""
        self._columns.leave(one)
        self._most_blocks -= self._most_blocks_of(one)
        self.ending -= one.ending is not None
        if one in self.prefills:
            self.prefills.remove(one)

    def _most_blocks_of(self, one: Tracked) -> int:
        """Its blocks at the end, if its output is as long as it may be; the last token is never computed."""
        return -(-(one.prompt_tokens + one.ceiling - 1) // self._block_size)

    @property
    def traits(self) -> ServiceTraits:
        """What is known of the service now."""
        mean_s, deviation_s = self.beliefs.monitor.execution
        return ServiceTraits(mean_s, deviation_s, self.history.mean, self._quota, self.execution_s)

    @property
    def columns(self) -> Columns:
        """The running requests' attributes as arrays; of use until the next change."""
        self.settle()
        return self._columns

    def sequences(self) -> tuple[int, ...]:
        """The numbers of the running requests."""
        return tuple(self._columns.sequences.tolist())

    def settle(self) -> None:
        """Write what requests' books are behind."""
        self.cohort.settle()
        self.write_begun()

    def begin(self, decodes: Sequence[Tracked]) -> None:
        """These take part in a step with one token each, during which no other is planned.

        That is not written to them at once: mostly nobody looks at them before its end.
        """
        self._begun = decodes

    def write_begun(self) -> None:
        """Write to those who ``begin`` a step that they are in one; ``account`` need not."""
        for one in self._begun:
            one.scheduled += 1
            one.expected += 1
            one.in_flight += 1
        self._begun = ()

    def take_begun(self) -> int:
        """How many of the plan in flight, its first rows, were not told of it; that is up to the caller."""
        begun, self._begun = len(self._begun), ()
        return begun

    def planned(self, *, everybody: bool) -> None:
        """A step was planned; with ``everybody``, all running requests are to get a token."""
        self.in_flight += 1
        self._columns.planned(everybody=everybody)

    def executed(self, duration_ns: int, admissions: int | None, *, everybody: bool) -> None:
        """A step ended, and with it a plan in flight.

        admissions: where all took part that were running after so many admissions, and still are; everybody:
        all of those got a token.
        """
        self.in_flight -= 1
        self._peaks.stepped()
        self.changed(members=False)
        if admissions is None:
            self._columns.forget()
            return
        rows, took_part = self.rows, len(self.rows)
        if rows and (rows[-1].sequence or 0) >= admissions:
            took_part = bisect_left(rows, admissions, key=BY_SEQUENCE)
        self._columns.executed(took_part, duration_ns, everybody=everybody)

    def foresaw(self, one: Tracked) -> None:
        """Something else is predicted of a running request."""
        self._columns.foresaw(one)

    def forget_columns(self) -> None:
        """Steps were, or will be, counted for all running requests at once."""
        self._columns.forget()

    def changed(self, *, members: bool) -> None:
        """Tokens or (``members``) the running requests or their shared blocks changed."""
        self._crowd = None
        if members:
            self._members, self._shares_known = None, False

    def crowd(self) -> Crowd:
        """A snapshot of the running requests, made again only after a change."""
        if self._crowd is None:
            rows, cohort = self.rows, self.cohort
            if not self._shares_known:
                self._shares, self._shares_known = self._shared_by(rows), True
            self._crowd = Crowd(
                self.layout,
                self._block_size,
                len(rows),
                self._shares,
                self._static,
                lambda: cohort.tokens(rows) if cohort.rows else self.columns.expected.copy(),
                lambda: self._columns.predicted.copy(),
                lambda crowd: self.history.distribution(crowd.generated),
                peaks=self._peaks,
                own_blocks=cohort.own_blocks if len(cohort.rows) == len(rows) else None,
                most_own_blocks=None if self.in_flight else self._most_blocks,
            )
        return self._crowd

    def _static(self) -> Members:
        if self._members is None:
            self._members = Members(self._columns.members(), self._shares)
        return self._members

    def crowd_without(self, gone: Sequence[Tracked]) -> Crowd:
        """The crowd if these running requests had left."""
        crowd = self.crowd()
        left = {id(one) for one in gone if one.service == self.service}
        if not left:
            return crowd
        self.cohort.settle()
        stay = [id(one) not in left for one in self.rows]
        if crowd.shared is None:
            return crowd.only(np.array(stay))
        rest = [one for one, stays in zip(self.rows, stay, strict=True) if stays]
        members = Members.of(rest, self._shared_by(rest))
        return Crowd.of(self.layout, self._block_size, members, rest, self.history)

    def _shared_by(self, requests: Sequence[Tracked]) -> SharedBlocks | None:
        if not self.shared.any:
            return None
        return self.shared.sets([(one.blocks, one.shareable) for one in requests])

    def crowd_with(
        self, crowd: Crowd, joined: Sequence[Tracked], newcomer: Tracked, hits: Sequence[int]
    ) -> Crowd:
        """``crowd`` (those running and ``joined``) and one more that would begin with the blocks ``hits``."""
        self.shared.hold(hits)
        tables = [(one.blocks, one.shareable) for one in (*self.rows, *joined)]
        shared = self.shared.sets([*tables, (hits, len(hits))])
        self.shared.drop(hits)
        return LargerCrowd(crowd, newcomer, shared)

    def rename(self, moved: Mapping[int, int]) -> list[Tracked]:
        """Blocks got other numbers; returns the running requests whose tables changed."""
        self.shared.rename(moved)
        changed = []
        for one in self.rows:
            if any(block in moved for block in one.blocks):
                one.blocks = [moved.get(block, block) for block in one.blocks]
                changed.append(one)
        self.changed(members=True)
        return changed
