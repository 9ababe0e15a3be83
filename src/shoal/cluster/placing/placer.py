"""The placement of a running cluster: ends intervals, searches, changes it, and tells what was decided."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from shoal.cluster.manager.events import ClusterEvent, PlacementWanted
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions
from shoal.cluster.placing.change import PlacementChange, ServingEngine, Step, steps_between
from shoal.cluster.placing.controller import Decision, PlacementController
from shoal.cluster.placing.search_process import SearchFailed
from shoal.cluster.placing.search_task import SearchResult, SearchTask
from shoal.cluster.placing.status import PlacingStatus, Proposal
from shoal.cluster.placing.task_builder import ClusterFacts, build_task
from shoal.cluster.placing.traffic import IntervalFacts, Traffic
from shoal.cluster.router.call import Call
from shoal.cluster.router.fleet import Fleet
from shoal.cluster.status import EngineState, EngineStatus, ServiceState
from shoal.core import ConfigError, EngineDied, FinishReason
from shoal.engine import wire
from shoal.engine.step_samples import StepSample
from shoal.place.re_placement import Hysteresis

_log = logging.getLogger(__name__)
MIN_REQUESTS = 20
"""Requests of an interval that a search needs: with fewer, luck decides."""
_LEAST_GAIN = 3.0
"""Requests by which more goals must be met: one more or less of an interval's few is luck."""
_ASK_S = 5.0
"""A search does without the steps of engines that do not answer for this time."""
_POLL_S = 0.1

Searcher = Callable[[SearchTask], Awaitable[SearchResult]]
"""Searches in a process of its own; raises SearchFailed."""


class Placer:
    """Decides which engine takes requests of which service.

    emit: takes events for the manager. search: runs searches. Nothing here takes long in the event loop: the
    search and the fits of step times are in the process of ``search``.
    """

    def __init__(
        self,
        options: ClusterOptions,
        manager: Manager,
        fleet: Fleet,
        emit: Callable[[ClusterEvent], None],
        clock: Callable[[], int],
        search: Searcher,
    ) -> None:
        self._options = options.placement
        self._timeout_s = options.load_timeout_s
        self._manager = manager
        self._fleet = fleet
        self._emit = emit
        self._clock = clock
        self._search = search
        self._follows = self._options.policy == "search"
        """Whether the placement changes at the end of intervals."""
        self._traffic = Traffic(clock())
        self._last: IntervalFacts | None = None
        """The last interval."""
        self._controller = PlacementController(
            self._options.rule, Hysteresis(requests=_LEAST_GAIN) if self._options.hysteresis else None
        )
        self._execution_s: Mapping[str, float] = {}
        self._declared: dict[str, set[str]] = {}
        self._not_loaded: set[tuple[str, str]] = set()
        """(engine, service) whose load has failed."""
        self._changing = asyncio.Lock()
        interval_s = self._controller.interval_s if self._follows else 0.0
        self.status = PlacingStatus(self._options.policy, interval_s)

    def arrived(self, call: Call) -> None:
        """A call came."""
        self._traffic.arrived(call.id, call.request, list(call.unfinished), call.slo)

    def ended(self, call: Call, choice: int, finish: FinishReason) -> None:
        """A choice of a call ends."""
        reader = call.unfinished[choice]
        self._traffic.ended(call.id, choice, finish, reader.output_tokens, reader.record())

    async def run(self) -> None:
        """End intervals, and follow the load if that is the policy, until cancelled."""
        due_ns = self._clock()
        self._traffic.begin(due_ns)
        while True:
            interval_ns = round(self._controller.interval_s * 1e9)
            due_ns = max(due_ns, self._clock() - interval_ns) + interval_ns
            await asyncio.sleep((due_ns - self._clock()) / 1e9)
            await self._end_interval()

    async def set_engines(self, service: str, engines: Sequence[str]) -> None:
        """Place a service on exactly these engines; returns when they take its requests, and no others do.

        Raises ConfigError for an unknown service or engine, for no engine, and if it is given up.
        """
        self._require(service, engines)
        async with self._changing:
            self._not_loaded -= {(name, service) for name in engines}
            before = {engine.name: frozenset(engine.placed) & {service} for engine in self._manager.engines}
            after = {name: frozenset((service,) if name in engines else ()) for name in before}
            change = await self._carry_out(steps_between(before, after))
        if change.abandoned is not None:
            raise ConfigError(f"service {service!r} is not placed as asked for: {change.abandoned}")

    async def propose(self, *, apply: bool = False) -> Proposal:
        """Search a placement for the latest traffic, as an operator asks; apply: and change to it.

        Nothing is changed for a gain that is too small. Raises ConfigError if too few requests came, there
        is nothing to choose from, the search fails, or the change is given up.
        """
        async with self._changing:
            facts = self._latest_facts()
            found = await self._find(facts)
            if isinstance(found, str):
                raise ConfigError(f"no placement can be proposed: {found}")
            task, result = found
            changes, why = self._controller.judge(
                result.present, result.estimate, differs=_differs(task, result)
            )
            steps = self._steps_to(result) if changes else []
            proposal = self.status.proposal = Proposal(
                facts=facts, steps=steps, why=why, present=result.present, found=result.estimate
            )
            change = await self._carry_out(steps) if apply and steps else None
        if change is not None and change.abandoned is not None:
            raise ConfigError(f"the placement is not changed as proposed: {change.abandoned}")
        return proposal

    def _latest_facts(self) -> IntervalFacts:
        """Those of the present interval; of the last one, while fewer requests have come since."""
        now = self._traffic.facts(self._fleet.catalog.services, self._clock())
        few = self._last is not None and len(now.requests) < min(MIN_REQUESTS, len(self._last.requests))
        return self._last if self._last is not None and few else now

    def _require(self, service: str, engines: Sequence[str]) -> None:
        if service not in self._fleet.catalog.services:
            known = ", ".join(self._fleet.catalog.services)
            raise ConfigError(f"there is no service {service!r}; there are: {known}")
        names = [engine.name for engine in self._manager.engines]
        if unknown := [name for name in engines if name not in names]:
            raise ConfigError(f"there is no engine {unknown[0]!r}; there are: {', '.join(names)}")
        if not engines:
            raise ConfigError(f"service {service!r} needs at least one engine")
        if not self._is_loaded(service):
            state = self._manager.service(service).state
            raise ConfigError(f"service {service!r} is {state.value}; load it before it is placed")

    def _is_loaded(self, service: str) -> bool:
        return self._manager.service(service).state in (ServiceState.READY, ServiceState.LOADING)

    async def _end_interval(self) -> None:
        """Search a placement for the traffic of the interval that ends now, and perhaps change to it."""
        now_ns = self._clock()
        facts = self._traffic.facts(self._fleet.catalog.services, now_ns)
        if not self._follows and len(facts.requests) < MIN_REQUESTS:
            return  # the interval goes on, until an operator could ask for a search
        self._last = facts
        self._traffic.begin(now_ns)
        if not self._follows:
            return
        async with self._changing:
            decision, steps = await self._decide(facts)
            self._report(facts, decision, steps)
            if steps:
                await self._carry_out(steps)

    async def _decide(self, facts: IntervalFacts) -> tuple[Decision, list[Step]]:
        """The decision, and the steps of the change."""
        achieved = facts.achieved(self._execution_s)
        found = await self._find(facts)
        if isinstance(found, str):
            return self._controller.skip(found, achieved), []
        task, result = found
        decision = self._controller.decide(
            achieved, result.present, result.estimate, differs=_differs(task, result)
        )
        return decision, self._steps_to(result) if decision.changes else []

    async def _find(self, facts: IntervalFacts) -> tuple[SearchTask, SearchResult] | str:
        """Search for some traffic; or why there is no result."""
        if len(facts.requests) < MIN_REQUESTS:
            return f"{len(facts.requests)} requests came, fewer than {MIN_REQUESTS}"
        task = build_task(await self._cluster_facts(facts), self._options.search_time_s)
        if task is None:
            return "there are no two ready engines to choose from"
        try:
            result = await self._search(task)
        except SearchFailed as error:
            self.status.searches["failed"] += 1
            return f"the search failed: {error}"
        self.status.searches["done"] += 1
        self.status.search_s, self.status.learned = result.took_s, len(result.learned)
        self._execution_s = result.execution_s
        return task, result

    def _steps_to(self, result: SearchResult) -> list[Step]:
        """The change to what was found; services and engines that came during the search stay, and those that
        left are no part of it."""
        present = {engine.name: frozenset(engine.placed) for engine in self._manager.engines}
        searched = frozenset().union(*result.placement.values()) & self._fleet.catalog.services.keys()
        after = {
            name: (own - searched) | (result.placement.get(name, own) & searched)
            for name, own in present.items()
        }
        return steps_between(present, after)

    async def _cluster_facts(self, traffic: IntervalFacts) -> ClusterFacts:
        engines = self._fleet.engines
        statuses = [engines[status.name].complete_status(status) for status in self._manager.engines]
        for status in statuses:
            declared = self._declared.setdefault(status.name, set())
            declared.update(status.services)
            declared.update(service.name for service in engines[status.name].plan.options.services)
        return ClusterFacts(
            engines=statuses,
            plans={name: engine.plan for name, engine in engines.items()},
            services={
                name: service
                for name, service in self._fleet.catalog.services.items()
                if self._is_loaded(name)
            },
            declared={
                name: {each for each in own if (name, each) not in self._not_loaded}
                for name, own in self._declared.items()
            },
            traffic=traffic,
            steps=await self._ask_steps(statuses),
        )

    async def _ask_steps(self, statuses: Sequence[EngineStatus]) -> dict[str, Mapping[str, list[StepSample]]]:
        """Samples of steps of all ready engines that answer, by service."""
        steps: dict[str, Mapping[str, list[StepSample]]] = {}

        async def ask(name: str) -> None:
            with suppress(EngineDied, TimeoutError, KeyError):
                answer = await asyncio.wait_for(
                    self._fleet.engines[name].ask(wire.AskSteps, wire.Steps), _ASK_S
                )
                steps[name] = answer.services

        await asyncio.gather(*(ask(each.name) for each in statuses if each.state is EngineState.READY))
        return steps

    def _report(self, facts: IntervalFacts, decision: Decision, steps: Sequence[Step]) -> None:
        self.status.facts, self.status.decision = facts, decision
        self.status.decided_s, self.status.interval_s = time.time(), decision.interval_s
        what = ", ".join(map(str, steps)) if steps else "stays as it is"
        _log.info("placement: %s (%s); the next interval has %.0f s", what, decision.why, decision.interval_s)

    async def _carry_out(self, steps: Sequence[Step]) -> PlacementChange:
        """Carry out a change; it is given up if nothing of it happens for as long as a load may take."""
        change = PlacementChange(list(steps))
        self.status.steps, self.status.outcome = steps, None
        left, since_ns = len(steps) + 1, self._clock()
        while not change.ended:
            for step in change.next(self._serving_engines()):
                self._emit(self._event(step))
            if change.left < left:
                left, since_ns = change.left, self._clock()
            elif self._clock() - since_ns > self._timeout_s * 1e9:
                change.abandon(f"nothing of it was done for {self._timeout_s:g} s")
            if not change.ended:
                await asyncio.sleep(_POLL_S)
        if change.failed is not None:
            # It would stay placed on the engine without being served there.
            self._not_loaded.add((change.failed.engine, change.failed.service))
            self._emit(self._event(change.failed._replace(placed=False)))
        self.status.outcome = change.abandoned or "done"
        self.status.changes["done" if change.done else "abandoned"] += 1
        if change.abandoned is not None:
            _log.warning("placement: the change is given up: %s", change.abandoned)
        return change

    def _event(self, step: Step) -> PlacementWanted:
        """Where weights have a limit, a service that is no longer placed stays: they leave by themselves."""
        weights = self._fleet.engines[step.engine].plan.options.weights
        return PlacementWanted(step.service, step.engine, step.placed, weights.memory_bytes is None)

    def _serving_engines(self) -> dict[str, ServingEngine]:
        found = {}
        for engine in self._manager.engines:
            ready = engine.state is EngineState.READY
            placed = frozenset(engine.placed)
            has = frozenset(name for name in placed if self._manager.has(name, engine.name))
            loads = frozenset(name for name in placed if self._manager.loads(name, engine.name))
            found[engine.name] = ServingEngine(placed, has if ready else frozenset(), loads, ready)
        return found


def _differs(task: SearchTask, result: SearchResult) -> bool:
    """Whether a search found another placement than the present one."""
    return dict(result.placement) != dict(task.present)
