"""Engines of a placement, and simulations of all of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.manager.dispatch import DispatchPolicy, LeastRequests, PackerDispatch
from shoal.core import SLO, ConfigError, Request
from shoal.core.slo import resolve_slo
from shoal.forecast import ScaledTimes
from shoal.kvcache import plan_layout
from shoal.measure import RunRecord
from shoal.place.memory import MemoryCheck
from shoal.place.placement import GroupShape, Placement
from shoal.place.traffic import StepTimesOf
from shoal.schedule import SchedulerOptions
from shoal.simulate.kv_shape import kv_shape
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import OpenLoop
from shoal.simulate.spec import HOST_BYTES_PER_S, EngineSpec, ServiceSpec, Watch

_NO_SAMPLES = Watch(sample_s=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedService:
    """What a service is like on every group."""

    context_tokens: int
    """Its context limit."""
    slo: SLO
    """As in ``core.Service``."""
    execution_s: float
    """L^: what its mean request takes alone on one device, the same for all placements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEngines:
    """Makes the engines of groups; can be sent to other processes if ``times`` can."""

    services: Mapping[str, ServedService]
    """By name."""
    memory: MemoryCheck
    """The services' models, and how much of a device's memory is used."""
    times: StepTimesOf
    """How long steps take."""
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    """Of every engine."""
    layout: str = "merged"
    """Kind of layout of the KV pools."""
    block_size: int = 16
    """Tokens of a KV block."""
    fixed_parts: bool = False
    """The services of a group have equal fixed parts of its compute and KV, as in MuxServe; False: they take
    turns in one engine."""

    def engines(self, shape: GroupShape) -> list[EngineSpec]:
        """A group's engine, or its engines; raises ConfigError if there is no room for KV."""
        left = self.memory.left_bytes(shape.services, shape.memory_bytes, shape.tp)
        if not self.fixed_parts:
            return [self._engine(shape, shape.services, left, 1)]
        parts = len(shape.services)
        return [self._engine(shape, [name], left // parts, parts) for name in shape.services]

    def _engine(self, shape: GroupShape, names: Sequence[str], memory_bytes: int, parts: int) -> EngineSpec:
        """One engine, with the memory for KV on each device, and one of so many parts of the compute."""
        layout = plan_layout(
            {name: kv_shape(self.memory.services[name].model, shape.tp, False) for name in names},
            memory_bytes=memory_bytes,
            block_size=self.block_size,
            kind=self.layout,
        )
        services = {}
        for name in names:
            times = self.times(name, shape.kind, shape.tp)
            services[name] = ServiceSpec(
                times=times if parts == 1 else ScaledTimes(times, parts),
                context_tokens=self.services[name].context_tokens,
                slo=self.services[name].slo,
                execution_s=self.services[name].execution_s,
                weights=self.memory.services[name].weights,
            )
        # Every device holds its part of the KV, and has a link of its own to the host.
        return EngineSpec(
            services=services,
            layout=layout,
            scheduler=self.scheduler,
            host=layout,
            host_bytes_per_s=HOST_BYTES_PER_S,
        )

    def simulate(
        self,
        placement: Placement,
        requests: Sequence[Request],
        dispatch: DispatchPolicy | PackerDispatch | None = None,
    ) -> RunRecord:
        """All engines of a placement under these requests.

        Those of services without an engine are refused, and miss their goals.

        dispatch: which of its engines gets a service's request; None: that with the fewest, as in SeaLLM.
        Raises ConfigError for a placement without services.
        """
        groups = [group for group in placement.groups if group.shares]
        if not groups:
            raise ConfigError("a placement without services serves nobody")
        engines = [engine for group in groups for engine in self.engines(group.shape)]
        placed = {name for engine in engines for name in engine.services}
        # The goals of others are known here alone: no engine of theirs has them.
        known = [each if each.service in placed else self._with_goals(each) for each in requests]
        policy = dispatch or LeastRequests()
        return Simulation(engines, OpenLoop(known), dispatch=policy, watch=_NO_SAMPLES).run("placement")

    def _with_goals(self, request: Request) -> Request:
        service = self.services[request.service]
        return replace(request, slo=resolve_slo(request.slo, service.slo, service.execution_s))
