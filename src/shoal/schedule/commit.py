"""From choices to a plan: tables grow, requests advance, and the executor's deltas are written down."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shoal.core import StepPlan
from shoal.kvcache import BlockPool
from shoal.schedule.compose import Share
from shoal.schedule.group import Group
from shoal.schedule.ledger import Ledger
from shoal.schedule.newcomers import Newcomer
from shoal.schedule.tracked import Tracked

_Columns = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Flight:
    """A plan in flight, and the request of each of its rows.

    riders: the leading rows, where they are its service's cohort. everybody: all that its service has running
    take part. admissions: how many requests had been admitted by then. borrowed: blocks of its service,
    saved: host blocks of its service, referenced until its update.
    """

    plan: StepPlan
    requests: list[Tracked]
    riders: Sequence[Tracked]
    everybody: bool
    admissions: int
    borrowed: list[int]
    saved: list[int]


class Committer:
    """Makes plans of what was chosen; from then on the scheduler's books say that they run.

    one_by_one: no plan is made while another is in flight.
    """

    def __init__(self, pool: BlockPool, ledger: Ledger, *, one_by_one: bool) -> None:
        self._one_by_one = one_by_one
        self._pool = pool
        self._ledger = ledger
        self._columns: dict[str, _Columns] = {}

    def commit(
        self, number: int, group: Group, share: Share, newcomers: Sequence[Newcomer], blocks: Sequence[int]
    ) -> Flight:
        """Plan ``number``: the share of those running, who get ``blocks`` to grow, and the newcomers."""
        grown = _grow(share.growth, blocks)
        saved: list[int] = []
        for newcomer in newcomers:
            self._ledger.enter(newcomer.request)
            saved += self._ledger.forget_saved(newcomer.request)
        for one, end in share.slices:
            one.slice_end = end
        chunks = share.chunks + [(newcomer.request, newcomer.chunk) for newcomer in newcomers]
        # Not where somebody has looked at one of them since.
        together = bool(share.decodes) and share.decodes is group.cohort.rows
        riders = share.decodes if together else ()
        requests = share.decodes + [one for one, _ in chunks]
        if together:
            group.cohort.begin()
            group.forget_columns()
        else:
            group.cohort.settle()
            _end_prefills(group, share.decodes)
            group.begin(share.decodes)
            if not self._one_by_one:
                group.write_begun()
        alike, sampled = _alike(len(share.decodes))
        sampled += tuple(_advance_chunks(group, chunks, len(share.decodes)))
        everybody = len(requests) == len(group.rows)
        if everybody and not share.chunks:  # rows are in the order of admission
            sequences = group.sequences()
        else:
            sequences = tuple([one.sequence or 0 for one in requests[len(riders) :]])
            if together:
                sequences = group.cohort.sequences + sequences
        new_tokens = alike + tuple([count for _, count in chunks])
        columns = self._reuse(group.service, (sequences, new_tokens, sampled))
        ledger = self._ledger
        plan = StepPlan(
            number=number,
            service=group.service,
            sequences=columns[0],
            new_tokens=columns[1],
            sampled=columns[2],
            joined=tuple([newcomer.joined() for newcomer in newcomers]),
            left=tuple(ledger.left),
            grown=grown,
            vacate=tuple(ledger.vacate),
            zero=self._pool.take_dirty(),
            copies=tuple([copy for newcomer in newcomers for copy in newcomer.copies]),
            moved=tuple(ledger.moved.items()),
        )
        ledger.left.clear()
        ledger.vacate.clear()
        ledger.moved.clear()
        self._count_turns(number, group, prefill=bool(chunks))
        group.changed(members=bool(newcomers))
        borrowed = [copy.source for copy in plan.copies if not copy.source_host]
        group.planned(everybody=everybody and len(sampled) == len(requests))
        return Flight(plan, requests, riders, everybody, ledger.admissions, borrowed, saved)

    def _count_turns(self, number: int, group: Group, *, prefill: bool) -> None:
        """What orders that alternate between services look at."""
        for other in self._ledger.groups.values():
            if other is not group:
                other.streak = 0
        group.streak = 0 if prefill else group.streak + 1
        group.last_step = number
        if prefill:
            group.last_prefill = number

    def _reuse(self, service: str, columns: _Columns) -> _Columns:
        """The last plan's tuples where nothing changed, so that an executor can tell by identity."""
        last = self._columns.get(service)
        if columns == last:
            return last
        self._columns[service] = columns
        return columns


@lru_cache(maxsize=64)
def _alike(decodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """New tokens, and rows that sample, of so many decodes; the same tuples each time."""
    return (1,) * decodes, tuple(range(decodes))


def _end_prefills(group: Group, decodes: Sequence[Tracked]) -> None:
    """Some of them may compute the last token of a prompt."""
    for one in [one for one in group.prefills if one.expected - one.scheduled == 1]:
        if one in decodes:
            group.prefills.remove(one)


def _advance_chunks(group: Group, chunks: Sequence[tuple[Tracked, int]], first: int) -> list[int]:
    """Count tokens as scheduled; the rows, from ``first``, that sample one, which is expected from now on."""
    sampled = []
    for row, (one, count) in enumerate(chunks, start=first):
        one.scheduled += count
        one.in_flight += 1
        if one.scheduled == one.expected:
            sampled.append(row)
            one.expected += 1
            group.prefills.remove(one)
    return sampled


def _grow(
    growth: Iterable[tuple[Tracked, int]], blocks: Sequence[int]
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Hand out ``blocks`` to the tables that need them."""
    grown = []
    start = 0
    for one, count in growth:
        further = blocks[start : start + count]
        start += count
        one.blocks += further
        assert one.sequence is not None
        grown.append((one.sequence, tuple(further)))
    return tuple(grown)
