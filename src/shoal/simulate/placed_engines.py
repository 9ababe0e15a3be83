"""Engine specs for the groups of a placement, and the simulation of a whole placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from shoal.cluster.manager.dispatch import DispatchPolicy, LeastRequests, PackerDispatch
from shoal.core import SLO, ConfigError, Request
from shoal.core.slo import resolve_slo
from shoal.execute.simulated import HOST_BYTES_PER_S
from shoal.forecast import ScaledTimes
from shoal.kvcache import plan_layout
from shoal.measure import RunRecord
from shoal.place.memory import MemoryCheck
from shoal.place.placement import GroupShape, Placement
from shoal.place.traffic import StepTimesOf
from shoal.schedule import SchedulerOptions
from shoal.schedule.weights_options import WeightsOptions
from shoal.simulate.kv_shape import kv_shape
from shoal.simulate.simulation import Simulation
from shoal.simulate.sources import OpenLoop
from shoal.simulate.spec import EngineSpec, ServiceSpec, Watch

_NO_SAMPLES = Watch(sample_s=1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedService:
    """What is the same for a service on every group."""

    context_tokens: int
    slo: SLO
    execution_s: float
    """L^: time of its mean request alone on one device."""
    quota: int = 8
    starvation_s: float | None = None
    """As in ``core.Service``, like ``quota``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedEngines:
    """Makes the engine specs of groups; picklable if ``times`` is."""

    services: Mapping[str, ServedService]
    memory: MemoryCheck
    times: StepTimesOf
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    layout: str = "merged"
    block_size: int = 16
    fixed_parts: bool = False
    """Whether the services of a group have equal fixed parts of its compute and KV (MuxServe), instead of
    taking turns in one engine."""
    weights: WeightsOptions = field(default_factory=WeightsOptions)
    """How weights come and go where ``memory`` has a limit on them; its own limit is not used."""
    fetch_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rate at which weights come to a device, by kind; needed where ``memory`` has a limit on them."""
    fetch_slowdown: float = 1.0
    """As in ``EngineSpec``."""

    def __post_init__(self) -> None:
        """Raises ConfigError for fixed parts with a limit on weights."""
        if self.fixed_parts and self.memory.weights_limit_bytes is not None:
            raise ConfigError("services with fixed parts of a device keep their weights, without a limit")

    def engines(self, shape: GroupShape) -> list[EngineSpec]:
        """The engine of a group, or one per service (``fixed_parts``); raises ConfigError without room for
        KV."""
        left = self.memory.left_bytes(shape.services, shape.memory_bytes, shape.tp)
        if not self.fixed_parts:
            return [self._engine(shape, shape.services, left, 1)]
        parts = len(shape.services)
        return [self._engine(shape, [name], left // parts, parts) for name in shape.services]

    def _engine(self, shape: GroupShape, names: Sequence[str], memory_bytes: int, parts: int) -> EngineSpec:
        """One engine; memory_bytes: for KV on each device. parts: its compute is one of this many parts."""
        placed = self.memory.services
        layout = plan_layout(
            {name: kv_shape(placed[name].model, shape.tp, False) for name in names},
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
                quota=self.services[name].quota,
                starvation_s=self.services[name].starvation_s,
                weights=placed[name].weights,
                weight_bytes=placed[name].model.weight_bytes(shape.tp),
                pinned=placed[name].pinned,
            )
        limit = self.memory.limit_bytes(names, shape.tp)
        # Every device holds its part of the KV, and has a link of its own to the host.
        return EngineSpec(
            services=services,
            layout=layout,
            scheduler=self.scheduler,
            host=layout,
            host_bytes_per_s=HOST_BYTES_PER_S,
            weights=replace(self.weights, memory_bytes=limit),
            fetch_bytes_per_s=self.fetch_bytes_per_s.get(shape.kind),
            fetch_slowdown=self.fetch_slowdown,
        )

    def simulate(
        self,
        placement: Placement,
        requests: Sequence[Request],
        dispatch: DispatchPolicy | PackerDispatch | None = None,
    ) -> RunRecord:
        """Simulate all engines of a placement.

        Requests of services without an engine are refused, and miss their goals. dispatch: None: the engine
        with the fewest requests, as in SeaLLM. Raises ConfigError for a placement without services.
        """
        groups = [group for group in placement.groups if group.shares]
        if not groups:
            raise ConfigError("a placement without services serves no request")
        engines = [engine for group in groups for engine in self.engines(group.shape)]
        placed = {name for engine in engines for name in engine.services}
        # Services without an engine have their goals only here.
        known = [each if each.service in placed else self._with_goals(each) for each in requests]
        policy = dispatch or LeastRequests()
        return Simulation(engines, OpenLoop(known), dispatch=policy, watch=_NO_SAMPLES).run("placement")

    def _with_goals(self, request: Request) -> Request:
        service = self.services[request.service]
        return replace(request, slo=resolve_slo(request.slo, service.slo, service.execution_s))
