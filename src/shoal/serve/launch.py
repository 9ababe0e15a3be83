"""Starts a server: checks options, downloads models, starts tokenizers and engines, serves HTTP."""

import asyncio
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module

import psutil

from shoal.cluster.backends.make import make_backend
from shoal.cluster.backends.node_start import drop_early_node
from shoal.cluster.options import ClusterOptions, EnginePlan
from shoal.cluster.router.router import Router
from shoal.config.api_keys import check_key_services
from shoal.core import ConfigError, InvalidRequest, Service
from shoal.engine.options import SIMULATED
from shoal.engine.process.child_process import BUILDER, SIMULATED_BUILDER, check_open_files
from shoal.models import Progress, check_service
from shoal.models.progress import in_words
from shoal.serve.admin.kept_changes import KeptChanges
from shoal.serve.backend import TextCodec
from shoal.serve.cpu_workers import WorkerProcesses, Workers
from shoal.serve.http.address import check_address
from shoal.serve.model_download import FetchedService, check_template, fetch_service, pull_service
from shoal.serve.options import ServerOptions
from shoal.serve.service_manager import ServiceManager
from shoal.serve.stop_signal import StopSignal
from shoal.serve.tokenizers import Tokenizers
from shoal.serve.tracing import Tracing, tracing_from_environment

_log = logging.getLogger(__name__)
# A service manager gives the start this much more time than an engine has that loads without progress.
_START_MARGIN_S = 60.0
_EXTEND_EVERY_S = 20.0
OnReady = Callable[[str, Router, Mapping[str, TextCodec]], None]


def run_server(
    plans: Sequence[EnginePlan],
    options: ServerOptions,
    cluster: ClusterOptions | None = None,
    *,
    on_download: Progress | None = None,
    on_load: Callable[[str], None] | None = None,
    on_ready: OnReady | None = None,
) -> None:
    """Download missing models, start the engines and serve until SIGTERM or SIGINT; main thread only.

    plans: the engines. on_download, on_load: called with the progress of the start. on_ready: called with the
    base URL, the router and the tokenizers by service once the server accepts requests. Raises ConfigError,
    ModelUnavailable, ModelUnsupported or EngineDied if the start fails. An address in use and an impossible
    model are reported before any download.
    """
    # The rest of the log is set up when the engines have started.
    logging.getLogger("shoal").setLevel(options.log_level.upper())
    check_open_files()
    check_address(options)
    if _are_simulated(plans):
        drop_early_node()  # its first engine imports torch, which simulated engines do without
    tracing = tracing_from_environment()
    services = {service.name: service for plan in plans for service in plan.options.services}
    check_key_services(options.named_api_keys(), list(services))
    if cluster is None or cluster.backend == "local":
        _check_kv_memory(plans)
    for service in services.values():
        check_service(service)
    # A name that comes from the port alone would bring the changes to another configuration.
    kept = KeptChanges.of(None if cluster is None else cluster.name)
    cluster = _name_cluster(cluster or ClusterOptions(), options)
    manager = ServiceManager(extension_s=cluster.load_timeout_s + _START_MARGIN_S)
    progress = _with_status(on_download, manager)
    fetched = [fetch_service(service, progress) for service in services.values()]
    plans = [with_resolved_services(plan, [each.service for each in fetched]) for plan in plans]
    server = _Server(plans, fetched, options, cluster, tracing, manager, kept)
    try:
        # Not uvloop: with it, Ctrl-C in a terminal reaches child processes.
        asyncio.run(server.run(on_load, on_ready))
    finally:
        tracing.close()


def _are_simulated(plans: Sequence[EnginePlan]) -> bool:
    """Whether the engines are simulated: all of them are, or none."""
    return plans[0].options.device == SIMULATED


def _check_kv_memory(plans: Sequence[EnginePlan]) -> None:
    """Raise ConfigError if the KV pools of all CPU engines together exceed this machine's memory.

    Each engine checks free memory itself: engines that a restarted server finds have their pools already.
    """
    kv_bytes = [
        plan.options.kv_cache.memory_bytes
        for plan in plans
        if plan.options.device == "cpu" and plan.options.kv_cache.memory_bytes is not None
    ]
    if len(kv_bytes) > 1 and sum(kv_bytes) > (total := psutil.virtual_memory().total):
        raise ConfigError(
            f"kv_cache.memory: {len(kv_bytes)} engines on the CPU ask for {sum(kv_bytes) / 2**30:.1f} GiB"
            f" of KV together, but the machine has {total / 2**30:.1f} GiB of memory"
        )


def with_resolved_services(plan: EnginePlan, services: Sequence[Service]) -> EnginePlan:
    """``plan`` with its services replaced by those of ``services`` with the same names."""
    names = {service.name for service in plan.options.services}
    resolved = tuple(service for service in services if service.name in names)
    return replace(plan, options=replace(plan.options, services=resolved))


def _name_cluster(cluster: ClusterOptions, options: ServerOptions) -> ClusterOptions:
    """Name the cluster after the port, so that a server restarted on its port finds its engines.

    With port 0 the cluster stays unnamed, and the server starts new engines.
    """
    if cluster.name is not None or not options.port:
        return cluster
    return replace(cluster, name=f"port-{options.port}")


class _Server:
    """One run of a server, with its models already downloaded."""

    def __init__(
        self,
        plans: Sequence[EnginePlan],
        fetched: Sequence[FetchedService],
        options: ServerOptions,
        cluster: ClusterOptions,
        tracing: Tracing,
        manager: ServiceManager,
        kept: KeptChanges | None = None,
    ) -> None:
        self._kept = kept
        self._plans = plans
        self._services = [each.service for each in fetched]
        self._folders = {each.service.name: each.folder for each in fetched}
        self._options = options
        self._cluster = cluster
        self._tracing = tracing
        self._manager = manager

    async def run(self, on_load: Callable[[str], None] | None, on_ready: OnReady | None) -> None:
        """Start the engines, serve, and stop them."""
        tokenizers = Tokenizers()
        try:
            await self._run(tokenizers, on_load, on_ready)
        finally:
            await tokenizers.aclose()

    async def _run(
        self, tokenizers: Tokenizers, on_load: Callable[[str], None] | None, on_ready: OnReady | None
    ) -> None:
        stop = StopSignal(self._manager.stopping)
        workers = WorkerProcesses(preload="shoal.serve.app")
        with stop.on_signals():
            warming = asyncio.create_task(_warm_up(workers))
            starting = asyncio.create_task(self._start(tokenizers, workers, on_load))
            extending = asyncio.create_task(_extend_again(self._manager))
            stop_requested = asyncio.create_task(stop.drain.wait())
            await asyncio.wait((starting, stop_requested), return_when=asyncio.FIRST_COMPLETED)
            stop_requested.cancel()
            extending.cancel()
            if not starting.done():
                if on_load is not None:
                    on_load("stopping")
                starting.cancel()
                await asyncio.wait((starting,))
            if starting.cancelled() or starting.exception():
                warming.cancel()
                await asyncio.wait((warming,))
            if starting.cancelled():
                return
            router, codecs = starting.result()
            try:
                await warming
                from shoal.serve.server import serve_until_stopped

                await serve_until_stopped(
                    router,
                    codecs,
                    self._services,
                    self._options,
                    stop,
                    lambda url: self._report_ready(url, router, codecs, on_ready),
                    workers,
                    self._plans[0].options,
                    partial(pull_service, tokenizers),
                    self._tracing,
                    self._kept,
                )
            finally:
                await router.close()
            _log.info("stopped, and all engines have ended")

    async def _start(
        self, tokenizers: Tokenizers, workers: Workers, on_load: Callable[[str], None] | None
    ) -> tuple[Router, Mapping[str, TextCodec]]:
        """The engines, and the tokenizers by service name."""
        for service in self._services:
            try:
                await check_template(workers, service)
            except InvalidRequest as error:
                raise ConfigError(f"chat_template of service {service.name!r}: {error}") from error
        loading = (
            tokenizers.load(self._folders[service.name], service.chat_template, wait=False)
            for service in self._services
        )
        loaded = await asyncio.gather(*loading)
        codecs = {service.name: codec for service, codec in zip(self._services, loaded, strict=True)}
        # Many tokenizers take longer than engines. The rest is read after the start, or at its first use.
        reading = tokenizers.read_all()
        starting = asyncio.create_task(
            Router.start(
                self._plans,
                self._folders,
                codecs,
                make_backend(self._cluster),
                self._cluster,
                progress=partial(self._report_load, on_load),
                builder=SIMULATED_BUILDER if _are_simulated(self._plans) else BUILDER,
            )
        )
        try:
            await asyncio.wait((reading, starting), return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                await reading
            router = await starting
        except BaseException:
            starting.cancel()
            await asyncio.wait((starting,))
            if not starting.cancelled() and starting.exception() is None:
                await starting.result().close()
            raise
        reading.add_done_callback(_log_unreadable)
        return router, codecs

    def _report_load(self, on_load: Callable[[str], None] | None, what: str) -> None:
        self._manager.starting(what)
        if on_load is not None:
            on_load(what)

    def _report_ready(
        self, url: str, router: Router, codecs: Mapping[str, TextCodec], on_ready: OnReady | None
    ) -> None:
        """Log which engines were found running, now that the log is set up, and report that it is ready."""
        for engine, process in router.found_engines.items():
            _log.info(
                "engine %s: found running (process %d); requests of the server before are cancelled",
                engine,
                process,
            )
        self._manager.ready(url)
        if on_ready is not None:
            on_ready(url, router, codecs)


def _log_unreadable(reading: "asyncio.Task[None]") -> None:
    """Log why a tokenizer could not be read, after the start; its requests get the error."""
    if not reading.cancelled() and (error := reading.exception()) is not None:
        _log.error("%s", error)


def _with_status(on_download: Progress | None, manager: ServiceManager) -> Progress:
    """``on_download`` that also reports to ``manager``."""
    in_status = in_words(manager.starting)

    def report(what: str, done: int, total: int | None) -> None:
        in_status(what, done, total)
        if on_download is not None:
            on_download(what, done, total)

    return report


async def _extend_again(manager: ServiceManager) -> None:
    """Extend the time-out of the start until cancelled: engines that hang while loading end it themselves."""
    while True:
        manager.extend()
        await asyncio.sleep(_EXTEND_EVERY_S)


async def _warm_up(workers: WorkerProcesses) -> None:
    """Prepare for requests while engines load: start a worker process, and import the HTTP server."""
    await asyncio.gather(workers.start(), asyncio.to_thread(import_module, "shoal.serve.server"))
    gc.collect()
    gc.freeze()  # modules live forever: collections between tokens need not walk them
