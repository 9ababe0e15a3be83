"""Adds and removes services of a running engine: model loading in a thread, a new layout of the KV pool.

A model is loaded and probed in a thread while steps go on; both share the interpreter's lock, so steps take
longer. The service is added between two steps, when no plan is in flight. If its blocks fit into the existing
merged blocks, running requests are not affected. Otherwise all requests are preempted: their KV is swapped
out to host memory, or will be recomputed where there is no space. The same memory is divided again, and
requests resume as after any preemption.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from shoal.core import ConfigError, Service
from shoal.engine.info import ServiceInfo
from shoal.execute.protocol import Executor
from shoal.kvcache import (
    BlockPool,
    KVShape,
    PoolLayout,
    extend_layout,
    keeps_blocks,
    plan_layout,
    reduce_layout,
)
from shoal.schedule import Scheduler, ServiceLimits


class LoadedModel(Protocol):
    """A model that is ready to run."""

    @property
    def kv_shape(self) -> KVShape: ...


class ServiceHost(Protocol):
    """Models and KV memory of the executor; see ``TorchServices``."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services."""

    def load(self, service: Service, folder: Path) -> Any:
        """Load a ``LoadedModel``; called in a thread, one model at a time."""

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """Use another layout of the KV memory from the next plan on."""

    def add(self, service: Service, model: Any) -> None:
        """Add a service, between two plans."""

    def remove(self, service: str) -> None:
        """Remove a service without sequences, between two plans."""


@dataclass(frozen=True, slots=True)
class _LoadedService:
    """A service whose model is loaded, to be added."""

    service: Service
    model: LoadedModel
    done: Future[ServiceInfo]


class ServiceChanges:
    """Adds and removes the services of one engine; called by the engine's thread.

    executor: runs the engine's plans. host: loads models and lays out the memory. host_pool: the pool of
    swapped KV. int8: KV is stored as int8. limits_of, describe: of a service that was just added.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        executor: Executor,
        host: ServiceHost,
        *,
        host_pool: BlockPool | None,
        int8: bool,
        limits_of: Callable[[Service, Any], ServiceLimits],
        describe: Callable[[Service], ServiceInfo],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._executor = executor
        self._host = host
        self._host_pool = host_pool
        self._int8 = int8
        self._limits_of = limits_of
        self._describe = describe
        self._memory_bytes = pool.layout.total_bytes
        self._host_bytes = 0 if host_pool is None else host_pool.layout.total_bytes
        self._loading_lock = threading.Lock()
        self._loading: set[str] = set()
        """Services being loaded, or loaded and not added yet."""
        self._loaded: deque[_LoadedService] = deque()
        self._removing: dict[str, Future[None]] = {}
        """Services that accept no further requests, and are removed when they have none."""

    @property
    def ready(self) -> bool:
        """Whether a service can be added or removed once no plan is in flight."""
        if self._loaded:
            return True
        return bool(self._removing) and not all(map(self._scheduler.has_requests, self._removing))

    @property
    def weight_bytes(self) -> int:
        return self._host.weight_bytes

    def add(self, service: Service, folder: Path) -> Future[ServiceInfo]:
        """Load a service's model from ``folder``, and add it; returns at once.

        The future raises ConfigError, ModelUnavailable or ModelUnsupported.
        """
        done: Future[ServiceInfo] = Future()
        done.set_running_or_notify_cancel()
        name = service.name
        if name in self._scheduler.services or name in self._loading:
            done.set_exception(ConfigError(f"a service {name!r} is there already; remove it first"))
        elif self._pool.layout.kind != "merged":
            done.set_exception(_split_layout_error(name))
        else:
            self._loading.add(name)
            threading.Thread(
                target=self._load_model, args=(service, folder, done), name="shoal-loading", daemon=True
            ).start()
        return done

    def remove(self, service: str) -> Future[None]:
        """Reject further requests of a service, and remove it when it has none left; returns at once.

        The future raises ConfigError for an unknown service.
        """
        if service in self._removing:
            return self._removing[service]
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if service in self._loading:
            done.set_exception(ConfigError(f"service {service!r} is being loaded; wait until it is ready"))
        elif service not in self._scheduler.services:
            known = ", ".join(sorted(self._scheduler.services)) or "none"
            done.set_exception(ConfigError(f"there is no service {service!r}; there are: {known}"))
        elif self._pool.layout.kind != "merged":
            done.set_exception(_split_layout_error(service))
        else:
            self._scheduler.close_service(service)
            self._removing[service] = done
        return done

    def _load_model(self, service: Service, folder: Path, done: Future[ServiceInfo]) -> None:
        """Runs in a thread of its own."""
        try:
            with self._loading_lock:
                model = self._host.load(service, folder)
        except Exception as error:
            self._loading.discard(service.name)
            done.set_exception(error)
        else:
            self._loaded.append(_LoadedService(service, model, done))

    def apply(self) -> None:
        """Remove and add the services that are ready; no plan is in flight."""
        for name in [name for name in self._removing if not self._scheduler.has_requests(name)]:
            self._remove_now(name)
            self._removing.pop(name).set_result(None)
        while self._loaded:
            loaded = self._loaded.popleft()
            name = loaded.service.name
            limits = self._limits_of(loaded.service, loaded.model)
            try:
                self._scheduler.check_service(name, limits)
                layout, host_layout = self._layouts_with(name, loaded.model.kv_shape)
            except ConfigError as error:
                self._loading.discard(name)
                loaded.done.set_exception(error)
                continue
            self._add_now(loaded, limits, layout, host_layout)
            self._loading.discard(name)
            loaded.done.set_result(self._describe(loaded.service))

    def _remove_now(self, name: str) -> None:
        self._run_pending_plan()  # it removes sequences, while their service is still known
        layout, host_layout = reduce_layout(self._pool.layout, name), None
        if self._host_pool is not None:
            host_layout = reduce_layout(self._host_pool.layout, name)
            self._host_pool.lay_out(host_layout)
        self._pool.lay_out(layout)
        self._host.lay_out(layout, host_layout)
        self._scheduler.remove_service(name)
        self._host.remove(name)

    def _add_now(
        self,
        loaded: _LoadedService,
        limits: ServiceLimits,
        layout: PoolLayout,
        host_layout: PoolLayout | None,
    ) -> None:
        if self._host_pool is not None and host_layout is not None:
            if not keeps_blocks(self._host_pool.layout, host_layout):
                self._scheduler.drop_swapped()
            self._host_pool.lay_out(host_layout)
        if not keeps_blocks(self._pool.layout, layout):
            self._host.lay_out(self._pool.layout, host_layout)
            self._scheduler.preempt_all()
            self._run_pending_plan()
        self._pool.lay_out(layout)
        self._host.lay_out(layout, host_layout)
        self._host.add(loaded.service, loaded.model)
        self._scheduler.add_service(loaded.service.name, limits)

    def _run_pending_plan(self) -> None:
        """Have the executor copy to host memory and drop sequences, as no plan did yet."""
        self._executor.submit(self._scheduler.pending_plan())
        self._executor.collect()

    def _layouts_with(self, name: str, shape: KVShape) -> tuple[PoolLayout, PoolLayout | None]:
        """Pool and host layouts with one more service; raises ConfigError where none fits."""
        shape = replace(shape, int8=self._int8)
        layout = _with_service(self._pool.layout, name, shape, self._memory_bytes)
        self._check_capacity(name, layout)
        if self._host_pool is None:
            return layout, None
        try:
            return layout, _with_service(self._host_pool.layout, name, shape, self._host_bytes)
        except ConfigError as error:
            raise ConfigError(f"kv_cache.swap, for KV saved in host memory, is too small: {error}") from None

    def _check_capacity(self, added: str, layout: PoolLayout) -> None:
        """Raise ConfigError for a layout in which an accepted request could not run to its end."""
        for name in self._pool.layout.services:
            view = layout.services[name]
            room = layout.merged_blocks * view.blocks_per_merged * layout.block_size
            committed = self._scheduler.max_committed_tokens(name)
            if committed > room:
                raise ConfigError(
                    f"service {added!r} cannot be added now: with it a request of {name!r} can have"
                    f" {room} tokens, but an unfinished request may reach {committed}; try again later"
                )


def _with_service(layout: PoolLayout, name: str, shape: KVShape, memory_bytes: int) -> PoolLayout:
    """The layout extended by a service, or a new layout of the same memory."""
    extended = extend_layout(layout, name, shape) if layout.services else None
    if extended is not None:
        return extended
    shapes = {other: view.shape for other, view in layout.services.items()} | {name: shape}
    return plan_layout(shapes, memory_bytes=memory_bytes, block_size=layout.block_size)


def _split_layout_error(name: str) -> ConfigError:
    return ConfigError(
        f"service {name!r} cannot come or go while the engine runs: its KV pool has the split layout, which"
        " is laid out once; write kv_cache.layout: merged"
    )
