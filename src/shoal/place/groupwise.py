"""Placements estimated group by group, each shape of group once."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.place.estimate import Estimate, ServiceEstimate, added
from shoal.place.placement import GroupShape, Placement


class GroupModel(Protocol):
    """Says how groups serve their shares of the traffic."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests of each service in the traffic at hand."""
        ...

    def serve(self, shapes: Sequence[GroupShape]) -> Sequence[Mapping[str, ServiceEstimate]]:
        """Of each shape, how its services fare there, for their shares of the requests."""
        ...


class GroupwiseEvaluator:
    """A ``PlanEvaluator`` that adds up groups, which serve independently, and remembers every shape."""

    def __init__(self, model: GroupModel) -> None:
        self._model = model
        self._known: dict[GroupShape, Mapping[str, ServiceEstimate]] = {}
        self.services: Sequence[str] = tuple(model.requests)
        """All services."""

    @property
    def shapes(self) -> int:
        """How many different groups were looked at."""
        return len(self._known)

    def evaluate(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Of each placement; groups not seen before go to the model together."""
        wanted = [[group.shape for group in plan.groups if group.shares] for plan in placements]
        new = list(dict.fromkeys(shape for shapes in wanted for shape in shapes if shape not in self._known))
        if new:
            self._known.update(zip(new, self._model.serve(new), strict=True))
        return [self._sum(shapes) for shapes in wanted]

    def _sum(self, shapes: Sequence[GroupShape]) -> Estimate:
        parts: dict[str, list[ServiceEstimate]] = {name: [] for name in self.services}
        for shape in shapes:
            for name, part in self._known[shape].items():
                parts[name].append(part)
        return Estimate(
            {name: added(found) if found else self._nowhere(name) for name, found in parts.items()}
        )

    def _nowhere(self, name: str) -> ServiceEstimate:
        """Of a service without a group; it has missed a request even where none came lately."""
        missed = max(1, self._model.requests[name])
        return ServiceEstimate(missed, missed)
