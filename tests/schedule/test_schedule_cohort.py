"""Counting steps once for all that take part leaves the same books as writing each step to each request."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from orders_builders import make_tracked

from shoal.schedule.cohort import Cohort
from shoal.schedule.tracked import Tracked

SIZE = 4
STARTS = 1_000


@dataclass
class Plain:
    """What a request's books say when every step is written to them."""

    expected: int
    generated: int
    charged_ns: int
    last_token_ns: int
    largest_gap_ns: int
    blocks: int

    def step(self, start_ns: int, end_ns: int) -> None:
        self.blocks = max(self.blocks, -(-self.expected // SIZE))
        self.expected += 1
        self.generated += 1
        self.charged_ns += end_ns - start_ns
        self.largest_gap_ns = max(self.largest_gap_ns, end_ns - self.last_token_ns)
        self.last_token_ns = end_ns


@dataclass
class Pair:
    """A cohort beside plain books of the same requests."""

    now_ns: int = STARTS
    plain: dict[Tracked, Plain] = field(default_factory=dict)
    published: list[Tracked] = field(default_factory=list)
    sequences: Iterator[int] = field(default_factory=lambda: iter(range(10_000)))

    def __post_init__(self) -> None:
        self.cohort = Cohort(SIZE, self.published.append)

    def newcomer(self, prompt: int, outputs: int, spare: int = 0, waited_ns: int = 0) -> Tracked:
        """A request that has just got its first token, or ``waited_ns`` ago."""
        one = make_tracked(prompt=prompt, generated=1, predicted=1_000)
        one.sequence = next(self.sequences)
        one.last_token = one.slice_end = prompt + 1 + outputs
        one.scheduled = one.computed = prompt
        one.last_token_ns = one.served_ns = self.now_ns - waited_ns
        one.blocks = [0] * (-(-prompt // SIZE) + spare)
        self.plain[one] = Plain(prompt + 1, 1, 0, one.last_token_ns, 0, len(one.blocks))
        return one

    def steps(self, durations: list[int], idle_ns: int = 0, *, planned: bool = False) -> list[Tracked]:
        """Make steps, at most as many as the cohort allows; who ended with the last of them."""
        cohort, riders = self.cohort, list(self.cohort.rows)
        durations = durations[: cohort.steps_left]
        assert cohort.context == sum(self.plain[one].expected for one in riders)
        start_ns, ends_ns = self.now_ns + idle_ns, []
        needed = cohort.blocks_within(len(durations))
        if planned:
            durations = durations[:1]
            needed = len(cohort.growing())
            for one in cohort.growing():
                one.blocks.append(0)
            cohort.begin()
        else:
            for _, growing in list(cohort.growth(len(durations))):
                for one in growing:
                    one.blocks.append(0)
        before = sum(self.plain[one].blocks for one in riders)
        self.now_ns = start_ns
        for duration in durations:
            for one in riders:
                self.plain[one].step(self.now_ns, self.now_ns + duration)
            self.now_ns += duration
            ends_ns.append(self.now_ns)
        assert needed == sum(self.plain[one].blocks for one in riders) - before
        cohort.advance(start_ns, ends_ns)
        ended = cohort.pop_complete()
        assert ended == [one for one in riders if self.plain[one].expected == one.last_token]
        self.compare(ended)
        return ended

    def compare(self, requests: list[Tracked]) -> None:
        for one in requests:
            plain = self.plain[one]
            assert (one.expected, one.scheduled, one.computed) == (
                plain.expected,
                plain.expected - 1,
                plain.expected - 1,
            )
            assert (one.generated, one.charged_ns) == (plain.generated, plain.charged_ns)
            assert (one.last_token_ns, one.served_ns) == (plain.last_token_ns, plain.last_token_ns)
            assert (one.largest_gap_ns, len(one.blocks)) == (plain.largest_gap_ns, plain.blocks)


REQUESTS = st.tuples(st.integers(1, 30), st.integers(1, 40), st.integers(0, 2), st.integers(0, 50))
RUNS = st.lists(st.integers(1, 20), min_size=1, max_size=30)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), RUNS, st.integers(0, 40), st.booleans()),
        st.tuples(st.just("join"), st.integers(1, 30), st.integers(1, 40), st.integers(0, 2)),
        st.just(("settle",)),
    ),
    max_size=20,
)


@given(first=st.lists(REQUESTS, min_size=1, max_size=6), actions=ACTIONS)
def test_any_steps_joins_and_looks_leave_the_books_of_single_steps(first, actions):
    pair = Pair()
    there = [pair.newcomer(*one) for one in first]
    assert pair.cohort.form(there)
    for action, *details in actions:
        if not there:
            return
        if not pair.cohort.rows:
            assert pair.cohort.form(there)
        if action == "steps":
            durations, idle_ns, planned = details
            ended = pair.steps(durations, idle_ns, planned=planned)
            there = [one for one in there if one not in ended]
        elif action == "join":
            one = pair.newcomer(*details, waited_ns=0)
            one.last_token_ns = one.served_ns = pair.plain[one].last_token_ns = pair.now_ns
            if pair.cohort.served_ns != pair.now_ns:
                pair.cohort.settle()  # only who got a token in the cohort's last step joins it
                there.append(one)
                assert pair.cohort.form(there)
            else:
                pair.cohort.join(one)
                there.append(one)
        else:
            pair.cohort.settle()
            assert not pair.cohort.rows
            pair.compare(there)
        assert list(pair.cohort.rows) in (there, [])
        tokens = [pair.plain[one].expected for one in there]
        assert pair.cohort.rows == [] or pair.cohort.tokens(there).tolist() == tokens
    pair.cohort.settle()
    pair.compare(there)


def test_who_is_looked_at_during_a_step_is_part_of_it():
    pair = Pair()
    one = pair.newcomer(5, 10)
    assert pair.cohort.form([one])
    pair.steps([3])
    pair.cohort.begin()
    pair.cohort.settle()
    assert (one.expected, one.scheduled, one.computed, one.in_flight) == (8, 7, 6, 1)
    assert pair.cohort.rows == []


def test_nobody_is_in_it_where_one_cannot_just_decode():
    pair = Pair()
    ready, prompt, done = pair.newcomer(5, 10), pair.newcomer(5, 10), pair.newcomer(5, 10)
    prompt.scheduled -= 1
    done.slice_end = done.expected
    for other in (prompt, done):
        assert not pair.cohort.form([ready, other])
        assert pair.cohort.rows == []
    assert not pair.cohort.form([])


def test_it_stops_before_somebody_outgrows_what_is_believed():
    pair = Pair()
    one = pair.newcomer(5, 10)
    one.predicted = 4
    assert pair.cohort.form([one])
    assert pair.cohort.steps_left == 2  # with the next it would have 4 tokens
    assert pair.steps([1, 1, 1, 1]) == []
    assert (pair.cohort.steps_left, pair.cohort.rows) == (0, [one])


def test_it_stops_at_the_end_of_a_slice_and_ends_only_who_is_complete():
    pair = Pair()
    sliced, ends = pair.newcomer(5, 10), pair.newcomer(7, 3)
    sliced.slice_end = sliced.expected + 3
    assert pair.cohort.form([sliced, ends])
    assert pair.steps([1] * 9) == [ends]
    assert pair.cohort.rows == [sliced]
    assert pair.cohort.steps_left == 0


def test_books_are_written_once_and_then_offered_for_publishing():
    pair = Pair()
    short, long = pair.newcomer(5, 2), pair.newcomer(5, 9)
    assert pair.cohort.form([short, long])
    assert pair.steps([1, 1]) == [short]
    assert pair.published == [short]
    pair.cohort.settle()
    pair.cohort.settle()
    assert pair.published == [short, long]
