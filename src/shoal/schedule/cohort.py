"""Requests of one service that decode together: their steps are counted once for all of them.

For simulations, whose tokens say nothing: what a decode step changes of a request follows from how many
such steps there were. So a step costs the same however many requests take part in it.
"""

import heapq
from bisect import bisect, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from shoal.schedule.members import IntArray
from shoal.schedule.tracked import BY_SEQUENCE, Tracked


class Cohort:
    """The requests of a service that take part in all of its steps with one token each; empty at first.

    While requests are in it, what the steps change of them is not written to them: ``settle`` does that,
    or ``pop_complete`` for those that end. Their block tables always are as they should be.

    publish: told of a request when its books have been written.
    rows: by their numbers as running requests. context: positions that the next step attends, over all rows.
    served_ns: when the one that was served longest ago took part in a step.
    """

    def __init__(self, block_size: int, publish: Callable[[Tracked], None]) -> None:
        self.rows: list[Tracked] = []
        self.context = 0
        self.served_ns = 0
        self._size = block_size
        self._publish = publish
        self._clear()

    def _clear(self) -> None:
        self.rows = []
        self._steps = 0
        self._spent_ns = 0
        self._last_ns = 0
        self._under_way = False
        # What a row's books will say is its number here and what has been counted since it joined.
        self._expected: list[int] = []
        self._charged_ns: list[int] = []
        self._late: list[Tracked] = []
        self._gaps = _Longest()
        self._milestones: list[tuple[int, int, Tracked]] = []
        self._due: dict[int, list[Tracked]] = {}
        self._blocks = 0  # in the tables of all rows
        self._reserved = False  # some have more of them than their tokens need
        self._sequences: tuple[int, ...] | None = None

    def form(self, requests: Sequence[Tracked]) -> bool:
        """Take in all of ``requests``; False, and nobody is in it, where one of them cannot just decode."""
        self._clear()
        self._last_ns = max([one.last_token_ns for one in requests], default=0)
        self.served_ns = min([one.served_ns for one in requests], default=0)
        self.context = 0
        for one in requests:
            waits = one.expected - one.scheduled != 1 or one.tokens or one.ending is not None
            if waits or self._milestone(one) <= one.expected:
                self._clear()
                return False
            self.join(one)
        return bool(requests)

    def join(self, one: Tracked) -> None:
        """A request that has just got a token, and has its next before it; right after ``advance``.

        Its tokens say nothing: only those of synthetic prompts are not written down one by one.
        """
        self._sequences = None
        rows, sequence = self.rows, one.sequence
        assert sequence is not None
        if rows and sequence < (rows[-1].sequence or 0):
            at = bisect([row.sequence or 0 for row in rows], sequence)
        else:
            at = len(rows)
        rows.insert(at, one)
        self._expected.insert(at, one.expected - self._steps)
        self._charged_ns.insert(at, one.charged_ns - self._spent_ns)
        if one.last_token_ns != self._last_ns:
            self._late.append(one)
        self.context += one.expected
        heapq.heappush(self._milestones, (self._steps + self._milestone(one) - one.expected, sequence, one))
        spare = len(one.blocks) * self._size - one.scheduled
        self._blocks += len(one.blocks)
        self._reserved |= spare >= self._size
        grows = self._steps + spare
        insort(self._due.setdefault(grows, []), one, key=BY_SEQUENCE)

    def _milestone(self, one: Tracked) -> int:
        """Tokens expected at which more has to be done for it than to count."""
        end = min(one.last_token, one.slice_end)
        # A step that makes it outgrow what is believed of its length is not for us.
        outgrown = one.prompt_tokens + one.predicted
        return end if outgrown >= one.last_token else min(end, outgrown - 1)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The numbers of its rows."""
        if self._sequences is None:
            self._sequences = tuple([one.sequence or 0 for one in self.rows])
        return self._sequences

    @property
    def steps_left(self) -> int:
        """So many steps its rows can take before more has to be done than to count; the last may end some."""
        return self._milestones[0][0] - self._steps if self._milestones else 0

    def tokens(self, requests: Sequence[Tracked]) -> IntArray:
        """``expected`` of requests, some of which may be in it."""
        if not self.rows:
            return np.array([one.expected for one in requests], dtype=np.int64)
        more = self._steps + self._under_way
        if len(requests) == len(self.rows):
            return np.array(self._expected, dtype=np.int64) + more
        known = dict(zip(self.rows, self._expected, strict=True))
        tokens = [known[one] + more if one in known else one.expected for one in requests]
        return np.array(tokens, dtype=np.int64)

    @property
    def own_blocks(self) -> int | None:
        """Blocks for all known tokens; None where they are not simply those that rows have or get next."""
        return None if self._reserved or self._under_way else self._blocks + len(self.growing())

    def growing(self) -> list[Tracked]:
        """Who needs a block for the next step."""
        return self._due.get(self._steps, [])

    def blocks_within(self, steps: int) -> int:
        """Blocks that so many steps need."""
        last, size = self._steps + steps - 1, self._size
        return sum([len(rows) * (1 + (last - at) // size) for at, rows in self._due.items() if at <= last])

    def growth(self, steps: int) -> Iterator[tuple[int, Sequence[Tracked]]]:
        """Who gets a block in which of the next steps, from 0; to be asked once, for steps that are made."""
        due, size = self._due, self._size
        for at in range(self._steps, self._steps + steps):
            rows = due.pop(at, None)
            if rows:
                later = due.get(at + size)
                due[at + size] = rows if later is None else sorted(later + rows, key=BY_SEQUENCE)
                self._blocks += len(rows)
                yield at - self._steps, rows

    def all_grow(self) -> bool:
        """Whether every row gets a block in every step."""
        return self._size == 1 and len(self.growing()) == len(self.rows)

    def grown(self, steps: int) -> None:
        """Everybody got one in each of so many steps, which are yet to be counted."""
        self._due[self._steps + steps] = self._due.pop(self._steps)
        self._blocks += len(self.rows) * steps

    def begin(self) -> None:
        """A step with everybody in it was planned; those who were ``growing`` have their blocks."""
        for _ in self.growth(1):
            pass
        self._under_way = True

    def advance(self, start_ns: int, ends_ns: Sequence[int]) -> None:
        """Count one step for each of ``ends_ns``; the first began at ``start_ns``."""
        first_ns, last_ns, steps = ends_ns[0], ends_ns[-1], len(ends_ns)
        for one in self._late:
            one.largest_gap_ns = max(one.largest_gap_ns, first_ns - one.last_token_ns)
        self._late.clear()
        self._gaps.add(self._steps + 1, first_ns - self._last_ns)
        if steps > 1:
            longest_ns = max([end - start for start, end in pairwise(ends_ns)])
            self._gaps.add(self._steps + steps, longest_ns)
        self._steps += steps
        self._spent_ns += last_ns - start_ns
        self._last_ns = self.served_ns = last_ns
        self._under_way = False
        self.context += len(self.rows) * steps

    def pop_complete(self) -> list[Tracked]:
        """Take out those who have their last token now, with their books written; in the order of rows."""
        complete, others = [], []
        milestones = self._milestones
        while milestones and milestones[0][0] == self._steps:
            milestone = heapq.heappop(milestones)
            at = self.rows.index(milestone[2])
            if self._expected[at] + self._steps == milestone[2].last_token:
                complete.append(self._pop(at))
            else:
                others.append(milestone)
        for milestone in others:
            heapq.heappush(milestones, milestone)
        return complete

    def _pop(self, at: int) -> Tracked:
        self._write(at)
        one = self.rows.pop(at)
        del self._expected[at], self._charged_ns[at]
        self._sequences = None
        self.context -= one.expected
        self._blocks -= len(one.blocks)
        self._due[self._steps + len(one.blocks) * self._size - one.scheduled].remove(one)
        return one

    def settle(self) -> None:
        """Write everybody's books; nobody is in it any longer."""
        if self.rows:
            for at in range(len(self.rows)):
                self._write(at)
            self._clear()

    def _write(self, at: int) -> None:
        one, expected = self.rows[at], self._expected[at] + self._steps
        steps = expected - one.expected
        if steps:
            one.expected = expected
            one.scheduled = one.computed = expected - 1
            one.generated += steps
            one.charged_ns = self._charged_ns[at] + self._spent_ns
            one.served_ns = one.last_token_ns = self._last_ns
            one.largest_gap_ns = max(one.largest_gap_ns, self._gaps.since(self._steps - steps))
            self._publish(one)
        if self._under_way:
            one.expected += 1
            one.scheduled += 1
            one.in_flight += 1


class _Longest:
    """The longest of the times between tokens since any step."""

    def __init__(self) -> None:
        # Only those that no later one exceeds.
        self._steps: list[int] = []
        self._gaps_ns: list[int] = []

    def add(self, step: int, gap_ns: int) -> None:
        steps, gaps = self._steps, self._gaps_ns
        while gaps and gaps[-1] <= gap_ns:
            gaps.pop()
            steps.pop()
        steps.append(step)
        gaps.append(gap_ns)

    def since(self, step: int) -> int:
        """The longest after ``step``."""
        return self._gaps_ns[bisect(self._steps, step)]
