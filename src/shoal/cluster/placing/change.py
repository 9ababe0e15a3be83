"""A change of placement in steps, of which the next follows from what the engines serve by now; pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.cluster.placing.search_task import ServicesByEngine


class Step(NamedTuple):
    """One step: an engine begins or ends to take requests of a service."""

    service: str
    engine: str
    placed: bool

    def __str__(self) -> str:
        return f"{'+' if self.placed else '-'}{self.service} on {self.engine}"


@dataclass(frozen=True, slots=True)
class ServingEngine:
    """What an engine does now."""

    placed: frozenset[str] = frozenset()
    """Services that it is to take requests of."""
    serving: frozenset[str] = frozenset()
    """Those of them that it has loaded and accepts requests of; none while it is not ready."""
    loading: frozenset[str] = frozenset()
    """Those of them that it is to load and has not."""
    ready: bool = True


Engines = Mapping[str, ServingEngine]
"""All engines by name."""


def steps_between(before: ServicesByEngine, after: ServicesByEngine) -> list[Step]:
    """The steps from one placement to another: first those that place, then those that unplace.

    A service that is nowhere in ``after`` stays where it is, and so does an engine that ``after`` lacks.
    """
    kept = set().union(*after.values())
    steps = []
    for engine, services in sorted(after.items()):
        there = before.get(engine, frozenset())
        steps += [Step(service, engine, True) for service in sorted(services - there)]
        steps += [Step(service, engine, False) for service in sorted((there & kept) - services)]
    return sorted(steps, key=lambda step: not step.placed)


@dataclass(slots=True)
class PlacementChange:
    """Carries out steps: those that place at once, and when all of these are served, the others.

    A service leaves an engine only while another one serves it. It is abandoned where an engine
    that is to get a service is not ready any more, or does not load it; the services are then where the
    steps so far have put them.
    """

    steps: list[Step]
    sent: list[Step] = field(default_factory=list)
    abandoned: str | None = None
    """Why it was given up; None: it was not."""
    failed: Step | None = None
    """The step whose engine did not load its service."""
    done: bool = False
    """Whether all of its steps are carried out."""
    left: int = 0
    """Steps that were not carried out at the last call of ``next``."""

    @property
    def ended(self) -> bool:
        return self.done or self.abandoned is not None

    def abandon(self, why: str) -> None:
        """Give up the rest of it."""
        if not self.ended:
            self.abandoned = why

    def next(self, engines: Engines) -> list[Step]:
        """The steps to carry out now, each of which is returned once."""
        if self.ended:
            return []
        pending = [step for step in self.steps if not _is_done(step, engines)]
        self.left = len(pending)
        if not pending:
            self.done = True
            return []
        for step in pending:
            if (problem := self._problem(step, engines)) is not None:
                self.abandoned = problem
                return []
        placing = [step for step in pending if step.placed]
        return self._send(placing) if placing else self._unplace(pending, engines)

    def _problem(self, step: Step, engines: Engines) -> str | None:
        """Why a pending step cannot be carried out."""
        engine = engines.get(step.engine)
        if engine is None or (step.placed and not engine.ready):
            return f"engine {step.engine} is not ready"
        if step.placed and step in self.sent and step.service not in engine.loading:
            self.failed = step
            return f"engine {step.engine} cannot load {step.service}"
        return None

    def _send(self, steps: list[Step]) -> list[Step]:
        new = [step for step in steps if step not in self.sent]
        self.sent += new
        return new

    def _unplace(self, pending: list[Step], engines: Engines) -> list[Step]:
        """Of the steps that unplace, those whose service another engine serves afterwards."""
        leaving = {(step.service, step.engine) for step in self.steps if not step.placed}
        for step in pending:
            others = [
                name
                for name, engine in engines.items()
                if step.service in engine.serving and (step.service, name) not in leaving
            ]
            if step not in self.sent and not others:
                self.abandoned = f"no other engine serves {step.service}"
                return []
        return self._send(pending)


def _is_done(step: Step, engines: Engines) -> bool:
    engine = engines.get(step.engine)
    if engine is None:
        return False
    return step.service in engine.serving if step.placed else step.service not in engine.placed
