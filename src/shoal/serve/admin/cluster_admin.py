"""Operators' changes of a running server: of services (add, remove, load, pin), of engines (add, drain)."""

import asyncio
import threading
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import count

from shoal.cluster.options import EnginePlan
from shoal.cluster.placing.status import PlacingStatus
from shoal.cluster.status import EngineState, EngineStatus, ServiceState
from shoal.config.devices import EngineDevice, read_added_engine
from shoal.config.setting_tree import Table
from shoal.core import ConfigError, InvalidRequest, ModelUnavailable, Service
from shoal.engine.options import SIMULATED, EngineOptions
from shoal.models import check_service
from shoal.serve.admin.cluster_responses import EngineCard, Operation, ServiceCard, weight_places
from shoal.serve.admin.kept_changes import KeptChanges
from shoal.serve.admin.operations import Operations
from shoal.serve.api import Api
from shoal.serve.errors import ENGINE_NOT_FOUND, MODEL_NOT_FOUND, Conflict
from shoal.serve.metrics.usage import UsageReport
from shoal.serve.model_download import PulledService, PullService, check_template

_DRAIN_POLL_S = 0.1


class ClusterAdmin:
    """Starts operations on services and engines, and describes both.

    template: options of added engines, where their devices say nothing else; None: the defaults.
    pull: downloads models. kept: gets all changes that are made, for the next server.
    Unknown names raise InvalidRequest (404); changes that are impossible at present raise Conflict.
    """

    def __init__(
        self, api: Api, template: EngineOptions | None, pull: PullService, kept: KeptChanges
    ) -> None:
        self.operations = Operations()
        self.kept = kept
        self._api = api
        self._backend = api.backend
        self._changes = api.backend.administration
        self._template = template
        self._pull = pull
        self._adding: dict[str, Service] = {}  # services that are being added
        self._removing: dict[str, Service] = {}  # services that are being removed

    def engines(self) -> list[EngineCard]:
        return [EngineCard.of(engine) for engine in self._backend.engines]

    def services(self) -> list[ServiceCard]:
        """All services; those whose model is being downloaded come last."""
        known = self._backend.services
        adding = [service for name, service in self._adding.items() if name not in known]
        return [self._service_card(name) for name in known] + [_adding_card(service) for service in adding]

    def usage(self) -> UsageReport:
        """What API keys have used of services since the start of the server."""
        return self._api.metrics.usage.report()

    def placement(self) -> dict[str, list[str]]:
        """Names of each service's engines."""
        engines = self._backend.engines
        return {
            service: [engine.name for engine in engines if service in engine.placed]
            for service in self._backend.services
        }

    @property
    def placing(self) -> PlacingStatus:
        """What the placement policy did last."""
        return self._backend.placing

    async def check_template(self, service: Service) -> None:
        """Raise InvalidRequest for an invalid chat template."""
        await check_template(self._api.workers, service)

    def add_service(self, service: Service, engines: Sequence[str] | None) -> Operation:
        """Download the model of a new service, and load it on ``engines``; None: on all.

        Raises ModelUnavailable or ConfigError at once if the model is impossible.
        """
        name = service.name
        self.operations.check_free("add_service", name)
        if name in self._backend.services:
            raise Conflict(f"there is already a service named {name!r}; give this one another name")
        if engines is not None and not engines:
            known = ", ".join(engine.name for engine in self._backend.engines)
            raise InvalidRequest(f"name at least one engine; there are: {known}", "engines")
        for engine in engines or ():
            self._engine(engine, "engines")
        check_service(service)

        async def work(operation: Operation) -> None:
            try:
                model = await self._pull_model(service, operation)
                _set_progress(operation, f"loading {service.model}")
                try:
                    await self._changes.add_service(model.service, model.folder, model.tokenizer, engines)
                except BaseException:
                    model.tokenizer.close()
                    raise
                self._api.add_service(model.service, model.tokenizer)
                self.kept.service_added(service, engines)
            finally:
                del self._adding[name]

        self._adding[name] = service
        return self.operations.start("add_service", name, work)

    def remove_service(self, name: str) -> Operation:
        """Reject new requests for a service from now on, and remove it once its requests have ended."""
        self._check_service(name)
        self.operations.check_free("remove_service", name)
        if list(self._api.services) == [name]:
            raise Conflict(f"service {name!r} is the last one; add another before, or unload it")
        if name in self._api.services:
            self._removing[name] = self._api.services[name]
        tokenizer = self._api.remove_service(name)

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"waiting for the requests of {name}")
            self.kept.service_removed(name)
            try:
                await self._changes.remove_service(name)
            finally:
                self._removing.pop(name, None)
                if tokenizer is not None:
                    tokenizer.close()

        return self.operations.start("remove_service", name, work)

    def load_service(self, name: str) -> Operation:
        """Load a service that is not loaded."""
        self._check_service(name)

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"loading {name}")
            await self._changes.load_service(name)

        return self.operations.start("load_service", name, work)

    def unload_service(self, name: str) -> Operation:
        """Unload a service once its requests have ended; the next request loads it again."""
        self._check_service(name)

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"waiting for the requests of {name}")
            await self._changes.unload_service(name)

        return self.operations.start("unload_service", name, work)

    def pin_service(self, name: str, pinned: bool) -> Operation:
        """Keep the weights of a service in the memory of its engines, or let them come and go again."""
        self._check_service(name)

        async def work(operation: Operation) -> None:
            await self._changes.pin_service(name, pinned)
            self.kept.service_pinned(name, pinned)

        return self.operations.start("pin_service" if pinned else "unpin_service", name, work)

    def place_service(self, name: str, engines: Sequence[str]) -> Operation:
        """Have exactly these engines take requests of a service.

        Raises InvalidRequest if there is none.
        """
        self._check_service(name)
        for engine in engines:
            self._engine(engine, "engines")
        if not engines:
            raise InvalidRequest("name at least one engine", "engines")

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"placing {name} on {', '.join(engines)}")
            await self._changes.set_engines(name, engines)
            self.kept.service_placed(name, engines)

        return self.operations.start("place_service", name, work)

    def propose_placement(self, *, apply: bool) -> Operation:
        """Search a placement for the latest traffic; apply: and change to it, if it is worth it."""

        async def work(operation: Operation) -> None:
            _set_progress(operation, "searching a placement")
            proposal = await self._changes.propose_placement(apply=apply)
            if apply:
                now = self.placement()
                for name in sorted({step.service for step in proposal.steps} & now.keys()):
                    self.kept.service_placed(name, now[name])

        kind = "apply_placement" if apply else "plan_placement"
        return self.operations.start(kind, "of all services", work)

    def add_engine(self, settings: Table) -> Operation:
        """Start an engine; settings: one of ``devices``, with ``services`` beside it (without: all).

        Raises ConfigError for invalid settings.
        """
        device, services = read_added_engine(settings)
        names = [engine.name for engine in self._backend.engines]
        name = device.name or next(str(number) for number in count() if str(number) not in names)
        self.operations.check_free("add_engine", name)
        if name in names:
            raise Conflict(f"there is already an engine named {name!r}; give this one another name")
        plan = EnginePlan(name=name, options=self._engine_options(device, self._select_services(services)))

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"starting engine {name}")
            await self._changes.add_engine(plan)
            self.kept.engine_added(name, settings)

        return self.operations.start("add_engine", name, work)

    def drain_engine(self, name: str) -> Operation:
        """Send an engine no more requests, and migrate its requests; done when it has none left.

        Requests that no other engine can run finish there. Raises Conflict if services would have no engine.
        """
        self._check_leaving(name)

        async def work(operation: Operation) -> None:
            self._changes.drain_engine(name)
            self.kept.engine_left(name, "drained")
            while (engine := self._find_engine(name)) is not None and (engine.requests or engine.leases):
                if engine.state is not EngineState.DRAINING:
                    raise ConfigError(f"engine {name!r} takes requests again, because it was undrained")
                _set_progress(
                    operation, f"waiting for the {engine.requests + engine.leases} requests of engine {name}"
                )
                await asyncio.sleep(_DRAIN_POLL_S)

        return self.operations.start("drain_engine", name, work)

    def undrain_engine(self, name: str) -> Operation:
        """Send requests to a drained engine again; raises Conflict for any other engine."""
        if self._engine(name).state is not EngineState.DRAINING:
            raise Conflict(f"engine {name!r} is not drained")

        async def work(operation: Operation) -> None:
            self._changes.undrain_engine(name)
            self.kept.engine_left(name, None)

        return self.operations.start("undrain_engine", name, work, ends="drain_engine")

    def activate_engine(self, name: str) -> Operation:
        """Start an engine on standby; raises Conflict for any other engine."""
        engine = self._engine(name)
        if engine.state is not EngineState.STANDBY and not engine.deactivating:
            raise Conflict(f"engine {name!r} is not on standby, but {engine.state}")

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"starting engine {name}")
            await self._changes.activate_engine(name)
            self.kept.engine_left(name, None)

        return self.operations.start("activate_engine", name, work, ends="deactivate_engine")

    def deactivate_engine(self, name: str) -> Operation:
        """Move an engine's requests to others, and end it until it is activated.

        Raises Conflict if services would have no engine.
        """
        self._check_leaving(name)

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"moving the requests of engine {name}")
            await self._changes.deactivate_engine(name)
            self.kept.engine_left(name, "standby")

        return self.operations.start("deactivate_engine", name, work)

    def remove_engine(self, name: str) -> Operation:
        """Stop an engine; its requests continue on others. Raises Conflict if a service needs the engine."""
        self._check_leaving(name)

        async def work(operation: Operation) -> None:
            _set_progress(operation, f"ending engine {name}")
            await self._changes.remove_engine(name)
            self.kept.engine_removed(name)

        return self.operations.start("remove_engine", name, work)

    async def _pull_model(self, service: Service, operation: Operation) -> PulledService:
        ended = threading.Event()

        def report(what: str, done: int, total: int | None) -> None:
            if ended.is_set():
                raise ModelUnavailable(f"fetching {service.model} was given up: the server ended")
            operation.progress, operation.done, operation.total = what, done, total

        _set_progress(operation, f"looking for {service.model}")
        try:
            return await self._pull(service, report)
        finally:
            ended.set()

    def _select_services(self, names: Sequence[str] | None) -> tuple[Service, ...]:
        """The services with these names; None: all. Raises InvalidRequest for unknown names, or none."""
        known = self._api.services
        if unknown := [name for name in names or () if name not in known]:
            raise _unknown_service(unknown[0], known, "services")
        chosen = tuple(service for name, service in known.items() if names is None or name in names)
        if not chosen:
            raise InvalidRequest(f"name at least one service; there are: {', '.join(known)}", "services")
        return chosen

    def _engine_options(self, device: EngineDevice, services: tuple[Service, ...]) -> EngineOptions:
        sharing = 1 + sum(engine.device == device.device for engine in self._backend.engines)
        template = self._template or EngineOptions(services=services)
        if device.simulated != (template.device == SIMULATED):
            raise ConfigError("simulated engines make up their tokens, so they cannot be beside others")
        kv_bytes = device.kv_memory_bytes or template.kv_cache.memory_bytes
        weight_bytes = device.weights_memory_bytes or template.weights.memory_bytes
        return replace(
            template,
            services=services,
            device=device.device,
            latency=device.latency or template.latency,
            kv_cache=replace(template.kv_cache, memory_bytes=kv_bytes),
            weights=replace(template.weights, memory_bytes=weight_bytes),
            threads=device.threads or template.threads,
            memory_share=1 / sharing,
        )

    def _check_service(self, name: str) -> None:
        if name not in self._backend.services and name not in self._adding:
            raise _unknown_service(name, self._backend.services)

    def _check_leaving(self, name: str) -> None:
        self._engine(name)
        try:
            self._changes.check_leaving(name)
        except ConfigError as error:
            raise Conflict(str(error)) from None

    def _engine(self, name: str, param: str | None = None) -> EngineStatus:
        engine = self._find_engine(name)
        if engine is None:
            names = ", ".join(engine.name for engine in self._backend.engines)
            raise InvalidRequest(f"there is no engine {name!r}; there are: {names}", param, ENGINE_NOT_FOUND)
        return engine

    def _find_engine(self, name: str) -> EngineStatus | None:
        return next((engine for engine in self._backend.engines if engine.name == name), None)

    def _service_card(self, name: str) -> ServiceCard:
        status, limits = self._backend.services[name], self._backend.info.services.get(name)
        service = self._api.services.get(name) or self._adding.get(name) or self._removing.get(name)
        named = "" if service is None else service.model
        return ServiceCard(
            name=name,
            model=named if limits is None else limits.model,
            state=status.state.value,
            error=status.error,
            engines=self.placement()[name],
            ready=status.ready,
            wanted=status.wanted,
            waiting=status.waiting,
            resumed=status.resumed,
            idle_after_s=status.idle_after_s,
            weight_bytes=None if limits is None else limits.weight_bytes,
            weights=weight_places(name, self._backend.engines),
            pinned=service is not None and service.pin if limits is None else limits.pinned,
        )


def _unknown_service(name: str, known: Collection[str], param: str | None = None) -> InvalidRequest:
    return InvalidRequest(
        f"service {name!r} is not served here; there are: {', '.join(known)}", param, MODEL_NOT_FOUND
    )


def _adding_card(service: Service) -> ServiceCard:
    """The card of a service that the engines do not know yet."""
    return ServiceCard(
        name=service.name,
        model=service.model,
        state=ServiceState.PULLING.value,
        error=None,
        engines=[],
        ready=0,
        wanted=0,
        waiting=0,
        resumed=0,
        idle_after_s=service.idle_after_s,
        weight_bytes=None,
        weights={},
        pinned=service.pin,
    )


def _set_progress(operation: Operation, what: str) -> None:
    operation.progress, operation.done, operation.total = what, 0, None
