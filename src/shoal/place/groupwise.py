"""Evaluation of placements group by group, with each group shape estimated once."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from shoal.place.estimate import Estimate, ServiceEstimate, added
from shoal.place.placement import GroupShape, Placement


class GroupModel(Protocol):
    """Estimates groups under their shares of the traffic."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Number of requests by service."""
        ...

    def serve(self, shapes: Sequence[GroupShape]) -> Sequence[Mapping[str, ServiceEstimate]]:
        """Estimates by service for each shape, for its shares of the requests."""
        ...


class GroupwiseEvaluator:
    """A ``PlanEvaluator`` that adds up independent groups, with a cache of shapes."""

    def __init__(self, model: GroupModel) -> None:
        self._model = model
        self._known: dict[GroupShape, Mapping[str, ServiceEstimate]] = {}
        self.services: Sequence[str] = tuple(model.requests)

    @property
    def shapes(self) -> int:
        """Number of evaluated shapes."""
        return len(self._known)

    def evaluate(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Evaluate all new shapes in one call of the model."""
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
            {name: added(found) if found else self._unserved(name) for name, found in parts.items()}
        )

    def _unserved(self, name: str) -> ServiceEstimate:
        """Estimate of a service without a group: at least one missed request."""
        missed = max(1, self._model.requests[name])
        return ServiceEstimate(missed, missed)
