"""Services that come and go while an engine runs.

A model is loaded and probed in a thread, and steps go on meanwhile; the two share the interpreter's lock, so
that steps take longer. The service enters between two steps, when no plan is in flight. Where its blocks fit
into the merged blocks that there are, nobody else notices. Otherwise everybody gives up their blocks: their
KV is saved in host memory, or where there is no room will be computed again; the same memory is cut anew; and
they go on as after any preemption.
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


class Loaded(Protocol):
    """A model that is ready to run."""

    @property
    def kv_shape(self) -> KVShape:
        """Of its KV blocks."""


class ServiceHost(Protocol):
    """What computes, as far as services come and go; see ``TorchServices``."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services."""

    def load(self, service: Service, folder: Path) -> Any:
        """Its model (a ``Loaded``); runs in a thread of its own, one at a time."""

    def lay_out(self, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        """See the KV memory in another way from the next plan on."""

    def add(self, service: Service, model: Any) -> None:
        """A service comes, between two plans."""

    def remove(self, service: str) -> None:
        """A service goes, between two plans, of which no sequence is left."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    """A service whose model is loaded."""

    service: Service
    model: Loaded
    done: Future[ServiceInfo]


class ServiceChanges:
    """Changes the services of one engine, whose thread calls all of this.

    executor: the one that gets the engine's plans. host: what loads models and sees the memory. host_pool: of
    KV saved in host memory. int8: KV is stored so. limits_of, describe: of a service that has just come.
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
        limits_of: Callable[[Service], ServiceLimits],
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
        self._one_at_a_time = threading.Lock()
        self._coming: set[str] = set()
        """Services that are being loaded, or wait to enter."""
        self._arrived: deque[_Arrival] = deque()
        self._going: dict[str, Future[None]] = {}
        """Services that take no further requests."""

    @property
    def ready(self) -> bool:
        """Whether a service could come or go now, if no plan were in flight."""
        if self._arrived:
            return True
        return bool(self._going) and not all(map(self._scheduler.has_requests, self._going))

    @property
    def weight_bytes(self) -> int:
        """Size of the weights of all services that are there."""
        return self._host.weight_bytes

    def add(self, service: Service, folder: Path) -> Future[ServiceInfo]:
        """Load a service's model from ``folder``, and let it enter; returns at once.

        The future raises ConfigError, ModelUnavailable or ModelUnsupported where that cannot be.
        """
        done: Future[ServiceInfo] = Future()
        done.set_running_or_notify_cancel()
        name = service.name
        if name in self._scheduler.services or name in self._coming:
            done.set_exception(ConfigError(f"a service {name!r} is there already; remove it first"))
        elif self._pool.layout.kind != "merged":
            done.set_exception(_split(name))
        else:
            self._coming.add(name)
            threading.Thread(
                target=self._load, args=(service, folder, done), name="shoal-loading", daemon=True
            ).start()
        return done

    def remove(self, service: str) -> Future[None]:
        """Refuse a service's further requests, and let it go when it has none left; returns at once.

        The future raises ConfigError where there is no such service.
        """
        if service in self._going:
            return self._going[service]
        done: Future[None] = Future()
        done.set_running_or_notify_cancel()
        if service in self._coming:
            done.set_exception(ConfigError(f"service {service!r} is being loaded; wait until it is ready"))
        elif service not in self._scheduler.services:
            known = ", ".join(sorted(self._scheduler.services)) or "none"
            done.set_exception(ConfigError(f"there is no service {service!r}; there are: {known}"))
        elif self._pool.layout.kind != "merged":
            done.set_exception(_split(service))
        else:
            self._scheduler.close_service(service)
            self._going[service] = done
        return done

    def _load(self, service: Service, folder: Path, done: Future[ServiceInfo]) -> None:
        """Runs in a thread of its own."""
        try:
            with self._one_at_a_time:
                model = self._host.load(service, folder)
        except Exception as error:
            self._coming.discard(service.name)
            done.set_exception(error)
        else:
            self._arrived.append(_Arrival(service, model, done))

    def apply(self) -> None:
        """Let those come and go who can; no plan is in flight."""
        for name in [name for name in self._going if not self._scheduler.has_requests(name)]:
            self._leave(name)
            self._going.pop(name).set_result(None)
        while self._arrived:
            arrival = self._arrived.popleft()
            name = arrival.service.name
            try:
                layout, host_layout = self._plan_layouts(name, arrival.model.kv_shape)
            except ConfigError as error:
                self._coming.discard(name)
                arrival.done.set_exception(error)
                continue
            self._enter(arrival, layout, host_layout)
            self._coming.discard(name)
            arrival.done.set_result(self._describe(arrival.service))

    def _leave(self, name: str) -> None:
        self._tell_executor()  # that sequences have left, as long as their service is known
        layout, host_layout = reduce_layout(self._pool.layout, name), None
        if self._host_pool is not None:
            host_layout = reduce_layout(self._host_pool.layout, name)
            self._host_pool.lay_out(host_layout)
        self._pool.lay_out(layout)
        self._host.lay_out(layout, host_layout)
        self._scheduler.remove_service(name)
        self._host.remove(name)

    def _enter(self, arrival: _Arrival, layout: PoolLayout, host_layout: PoolLayout | None) -> None:
        if self._host_pool is not None and host_layout is not None:
            if not keeps_blocks(self._host_pool.layout, host_layout):
                self._scheduler.drop_swapped()
            self._host_pool.lay_out(host_layout)
        if not keeps_blocks(self._pool.layout, layout):
            self._host.lay_out(self._pool.layout, host_layout)
            self._scheduler.preempt_all()
            self._tell_executor()
        self._pool.lay_out(layout)
        self._host.lay_out(layout, host_layout)
        self._host.add(arrival.service, arrival.model)
        self._scheduler.add_service(arrival.service.name, self._limits_of(arrival.service))

    def _tell_executor(self) -> None:
        """Have done what no plan has told yet: copies to host memory, and who has left."""
        self._executor.submit(self._scheduler.pending_plan())
        self._executor.collect()

    def _plan_layouts(self, name: str, shape: KVShape) -> tuple[PoolLayout, PoolLayout | None]:
        """Layouts with one more service; raises ConfigError where there can be none."""
        shape = replace(shape, int8=self._int8)
        layout = _with_service(self._pool.layout, name, shape, self._memory_bytes)
        self._require_room(name, layout)
        if self._host_pool is None:
            return layout, None
        try:
            return layout, _with_service(self._host_pool.layout, name, shape, self._host_bytes)
        except ConfigError as error:
            raise ConfigError(f"kv_cache.swap, for KV saved in host memory, is too small: {error}") from None

    def _require_room(self, coming: str, layout: PoolLayout) -> None:
        """Refuse a layout in which a request that was accepted could not run to its end."""
        for name in self._pool.layout.services:
            view = layout.services[name]
            room = layout.merged_blocks * view.blocks_per_merged * layout.block_size
            promised = self._scheduler.max_committed_tokens(name)
            if promised > room:
                raise ConfigError(
                    f"service {coming!r} cannot enter now: beside it a request of {name!r} can have"
                    f" {room} tokens, but one that is unfinished may get to {promised}; try again later"
                )


def _with_service(layout: PoolLayout, name: str, shape: KVShape, memory_bytes: int) -> PoolLayout:
    """The layout extended by a service, or a new one for the same memory."""
    extended = extend_layout(layout, name, shape) if layout.services else None
    if extended is not None:
        return extended
    shapes = {other: view.shape for other, view in layout.services.items()} | {name: shape}
    return plan_layout(shapes, memory_bytes=memory_bytes, block_size=layout.block_size)


def _split(name: str) -> ConfigError:
    return ConfigError(
        f"service {name!r} cannot come or go while the engine runs: its KV pool has the split layout, which"
        " is laid out once; write kv_cache.layout: merged"
    )
