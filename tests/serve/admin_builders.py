"""A fake cluster whose services and engines can be changed, and an operator's client."""

import asyncio
from dataclasses import replace

from serve_builders import (
    SERVICES,
    ByteTokenizer,
    FakeEngine,
    InlineWorkers,
    completion,
    make_client,
    make_tokenizers,
)

from shoal.cluster.status import EngineState, EngineStatus, ServiceState, ServiceStatus
from shoal.core import ConfigError
from shoal.engine.info import ServiceInfo
from shoal.serve import ServerOptions, create_app
from shoal.serve.model_download import PulledService

READY = ServiceStatus(ready=1, wanted=1, waiting=0)
LOADING = ServiceStatus(ready=0, wanted=1, waiting=0, state=ServiceState.LOADING)
UNLOADED = ServiceStatus(ready=0, wanted=0, waiting=0, state=ServiceState.UNLOADED)


class FakeAdministration:
    """Changes a fake cluster once ``hold`` is set; unknown models cannot be loaded."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.hold = asyncio.Event()
        self.hold.set()
        self.held = 0
        self.added = []
        self.plans = []
        self.kept = []
        self.placed = []
        self.proposal = None
        self.applied = []

    async def _wait(self):
        self.held += 1
        await self.hold.wait()
        self.held -= 1

    async def add_service(self, service, folder, tokenizer, engines=None):
        before = self.cluster.services
        self.set(service.name, LOADING)
        await self._wait()
        if service.model != "smollm2":
            self.cluster.services = before
            raise ConfigError(f"service {service.name!r} cannot be loaded: out of luck")
        self.added.append((service, folder, tokenizer, engines))
        chat = FakeEngine.info.fget(self.cluster).services["chat"]
        self.cluster.limits[service.name] = replace(chat, model=service.model)
        self.set(service.name, replace(READY, idle_after_s=service.idle_after_s))

    async def remove_service(self, name):
        await self._wait()
        self.cluster.limits.pop(name)
        self.cluster.services = {n: s for n, s in self.cluster.services.items() if n != name}

    async def load_service(self, name):
        await self._wait()
        self.set(name, READY)

    async def unload_service(self, name):
        await self._wait()
        self.set(name, UNLOADED)

    async def pin_service(self, name, pinned):
        if name == "chat":
            raise ConfigError("engine 0: weights.memory is too small")
        self.cluster.limits[name] = replace(self.cluster.info.services[name], pinned=pinned)

    async def set_engines(self, service, engines):
        await self._wait()
        if service == "base":
            raise ConfigError("service 'base' is not placed as asked for: engine 0 cannot load base")
        self.placed.append((service, engines))

    async def propose_placement(self, *, apply):
        await self._wait()
        if self.proposal is None:
            raise ConfigError("no placement can be proposed: 3 requests came, fewer than 20")
        self.cluster.placing.proposal = self.proposal
        self.applied += [apply]
        return self.proposal

    async def keep_service(self, name, idle_after_s):
        self.kept.append((name, idle_after_s))
        if idle_after_s == 0:
            self.set(name, UNLOADED)

    async def add_engine(self, plan):
        await self._wait()
        self.plans.append(plan)
        services = tuple(service.name for service in plan.options.services)
        own = EngineStatus(
            name=plan.name, state=EngineState.READY, services=services, device=plan.options.device
        )
        self.cluster.others = [*self.cluster.others, own]

    def check_leaving(self, name):
        if len(self.cluster.engines) == 1:
            raise ConfigError(f"engine {name!r} is the last one; add another before")

    def drain_engine(self, name):
        self.change(name, state=EngineState.DRAINING)

    def undrain_engine(self, name):
        self.change(name, state=EngineState.READY)

    async def activate_engine(self, name):
        await self._wait()
        self.change(name, state=EngineState.READY)

    async def deactivate_engine(self, name):
        self.change(name, state=EngineState.DRAINING, deactivating=True)
        await self._wait()
        self.change(name, state=EngineState.STANDBY, deactivating=False)

    async def remove_engine(self, name):
        await self._wait()
        self.cluster.others = [engine for engine in self.cluster.others if engine.name != name]

    def set(self, name, status):
        self.cluster.services = {**self.cluster.services, name: status}

    def change(self, name, **fields):
        self.cluster.others = [
            replace(engine, **fields) if engine.name == name else engine for engine in self.cluster.others
        ]


class ChangingCluster(FakeEngine):
    """A fake cluster with administration."""

    def __init__(self, **fields):
        super().__init__(**fields)
        self.limits: dict[str, ServiceInfo] = dict(FakeEngine.info.fget(self).services)
        self.administration = FakeAdministration(self)

    @property
    def info(self):
        return replace(FakeEngine.info.fget(self), services=self.limits)


class Operator:
    """Talks to a server in front of a fake cluster; pulls wait for ``pulling``."""

    def __init__(self, cluster, folder, workers=None, kept=None, engine_options=None, **options):
        self.cluster = cluster
        self.pulled = []
        self.tokenizers = []
        self.progress = ("downloading", 1, 4)
        self.release = asyncio.Event()
        self.release.set()

        async def pull(service, progress):
            progress(*self.progress)
            async with asyncio.timeout(60):
                await self.release.wait()
            progress("checking", 4, 4)
            self.pulled.append(service.name)
            self.tokenizers.append(ByteTokenizer(has_chat_template="base" not in service.name))
            return PulledService(service, folder, self.tokenizers[-1])

        app = create_app(
            cluster,
            make_tokenizers(),
            SERVICES,
            ServerOptions(**options),
            workers=workers or InlineWorkers(),
            pull=pull,
            kept=kept,
            engine_options=engine_options,
        )
        self.admin = app.state.admin
        self.client = make_client(app)
        self.client.headers["Host"] = "localhost"

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        self.release.set()
        await self.client.aclose()

    async def get(self, what):
        response = await self.client.get(f"/admin/{what}")
        assert response.status_code == 200, response.text
        return response.json()

    async def done(self, response, state="done"):
        """Wait for the operation of a 202; returns it."""
        assert response.status_code == 202, response.text
        path = response.headers["location"]
        async with asyncio.timeout(60):
            while (operation := (await self.client.get(path)).json())["state"] == "running":
                await asyncio.sleep(0.005)
        assert operation["state"] == state, operation
        return operation

    async def add(self, **body):
        return await self.client.post("/admin/services", json=body)

    async def complete(self, service):
        return await self.client.post("/v1/completions", json=completion(model=service))

    async def service(self, name):
        cards = (await self.get("services"))["data"]
        return next((card for card in cards if card["name"] == name), None)
