"""Changes of placement in steps: order, and what a change does when engines end or do not load."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.cluster.placing.change import PlacementChange, ServingEngine, Step, steps_between

SERVICES = ("a", "b", "c")
ENGINES = ("e0", "e1", "e2")
placements = st.fixed_dictionaries({engine: st.frozensets(st.sampled_from(SERVICES)) for engine in ENGINES})
complete = placements.filter(lambda placement: set().union(*placement.values()) == set(SERVICES))


def serving(placed: str, now: str | None = None, *, ready: bool = True) -> ServingEngine:
    """An engine; now: of the placed services those that it serves, else all."""
    served = frozenset(placed if now is None else now)
    return ServingEngine(frozenset(placed), served, frozenset(placed) - served, ready)


def test_steps_place_before_they_unplace():
    before = {"e0": frozenset("ab"), "e1": frozenset("c")}
    after = {"e0": frozenset("c"), "e1": frozenset("ab")}
    steps = steps_between(before, after)
    assert steps == [
        Step("c", "e0", True),
        Step("a", "e1", True),
        Step("b", "e1", True),
        Step("a", "e0", False),
        Step("b", "e0", False),
        Step("c", "e1", False),
    ]
    assert str(steps[0]) == "+c on e0"
    assert steps_between(after, after) == []


def test_a_service_that_the_new_placement_lacks_stays():
    assert steps_between({"e0": frozenset("ab")}, {"e0": frozenset("a")}) == []


def test_a_service_leaves_when_it_is_served_elsewhere():
    change = PlacementChange([Step("a", "e1", True), Step("a", "e0", False)])
    assert change.next({"e0": serving("a"), "e1": serving("")}) == [Step("a", "e1", True)]
    loading = {"e0": serving("a"), "e1": serving("a", "")}
    assert change.next(loading) == change.next(loading) == []
    assert change.next({"e0": serving("a"), "e1": serving("a")}) == [Step("a", "e0", False)]
    assert not change.ended
    assert change.next({"e0": serving(""), "e1": serving("a")}) == []
    assert change.done


def test_a_change_is_given_up_where_an_engine_ends_or_does_not_load():
    ended = PlacementChange([Step("a", "e1", True), Step("a", "e0", False)])
    ended.next({"e0": serving("a"), "e1": serving("")})
    assert ended.next({"e0": serving("a"), "e1": serving("a", "", ready=False)}) == []
    assert ended.abandoned == "engine e1 is not ready"
    failed = PlacementChange([Step("a", "e1", True), Step("a", "e0", False)])
    failed.next({"e0": serving("a"), "e1": serving("")})
    assert failed.next({"e0": serving("a"), "e1": serving("")}) == []
    assert failed.abandoned == "engine e1 cannot load a"
    assert failed.failed == Step("a", "e1", True)
    gone = PlacementChange([Step("a", "e1", True)])
    assert gone.next({"e0": serving("a")}) == []
    assert gone.abandoned == "engine e1 is not ready"


def test_the_last_engine_of_a_service_keeps_it():
    change = PlacementChange([Step("a", "e0", False)])
    dying = {"e0": serving("a"), "e1": serving("a", "", ready=False)}
    assert change.next(dying) == []
    assert change.abandoned == "no other engine serves a"


class Changes(RuleBasedStateMachine):
    """A cluster that loads and dies as it likes, and a controller that wants one placement after another."""

    @initialize(placement=complete)
    def start(self, placement):
        self.placed = {engine: set(services) for engine, services in placement.items()}
        self.loaded = {engine: set(services) for engine, services in placement.items()}
        self.ready = dict.fromkeys(ENGINES, True)
        self.change = PlacementChange([])
        self.wanted = {engine: frozenset(services) for engine, services in placement.items()}
        self.failed = False
        self.carried_out: list[Step] = []

    @property
    def engines(self):
        return {
            name: ServingEngine(
                frozenset(self.placed[name]),
                frozenset(self.placed[name] & self.loaded[name]) if self.ready[name] else frozenset(),
                frozenset(self.placed[name] - self.loaded[name]),
                self.ready[name],
            )
            for name in ENGINES
        }

    @rule(after=complete)
    def want(self, after):
        if self.change.ended or not self.change.steps:
            before = {name: frozenset(services) for name, services in self.placed.items()}
            self.change = PlacementChange(steps_between(before, after))
            self.wanted, self.carried_out = after, []
            self.failed = not all(self.ready.values())

    @rule()
    def advance(self):
        served = set().union(*(each.serving for each in self.engines.values()))
        for step in self.change.next(self.engines):
            assert step not in self.carried_out
            self.carried_out.append(step)
            (self.placed[step.engine].add if step.placed else self.placed[step.engine].remove)(step.service)
        assert served <= set().union(*(each.serving for each in self.engines.values()))

    @rule(engine=st.sampled_from(ENGINES), service=st.sampled_from(SERVICES))
    def load(self, engine, service):
        if self.ready[engine] and service in self.placed[engine]:
            self.loaded[engine].add(service)

    @rule(engine=st.sampled_from(ENGINES))
    def unload(self, engine):
        self.loaded[engine] &= self.placed[engine]

    @rule(engine=st.sampled_from(ENGINES), service=st.sampled_from(SERVICES))
    def fail_to_load(self, engine, service):
        elsewhere = any(service in self.placed[other] for other in ENGINES if other != engine)
        if service in self.placed[engine] - self.loaded[engine] and elsewhere:
            self.placed[engine].remove(service)
            self.failed = True

    @precondition(lambda self: all(self.ready.values()))
    @rule(engine=st.sampled_from(ENGINES))
    def die(self, engine):
        self.ready[engine], self.failed = False, True
        self.loaded[engine].clear()

    @rule(engine=st.sampled_from(ENGINES))
    def come_back(self, engine):
        if not self.ready[engine]:
            self.ready[engine] = True
            self.loaded[engine] = set(self.placed[engine])

    @rule()
    def settle(self):
        """Load everything and go on to the end: what is wanted is reached unless something failed."""
        for _ in range(4):
            for engine in ENGINES:
                self.come_back(engine)
                self.loaded[engine] |= self.placed[engine]
            self.advance()
        assert self.change.ended or not self.change.steps
        if not self.failed:
            assert self.change.abandoned is None
            assert {name: frozenset(services) for name, services in self.placed.items()} == self.wanted

    @invariant()
    def every_service_is_placed(self):
        assert set().union(*self.placed.values()) == set(SERVICES)


TestChanges = Changes.TestCase
