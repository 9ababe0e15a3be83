"""LiveFeed: looks at the cluster once a second, and gives what it sees to everybody who watches."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Set
from contextlib import suppress

from msgspec.structs import replace

import shoal
from shoal.cluster.status import EngineStatus
from shoal.serve.admin.cluster_responses import Health
from shoal.serve.api import Api
from shoal.serve.openai.response_bodies import encode
from shoal.serve.page.events import EventList, View, changes_between
from shoal.serve.page.notes import note_of
from shoal.serve.page.snapshot import Engine, Service, Snapshot, requests_of
from shoal.serve.page.window import RestartingCounters, Window

_INTERVAL_S = 1.0
_WINDOW_S = 60.0
# Of unfinished requests, and of those that ended.
_MAX_REQUESTS = 100
_log = logging.getLogger(__name__)


class LiveFeed:
    """Counts and events of the last minute; they are kept also while nobody watches.

    A snapshot is made once a second for all watchers together, and only if there are any.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._window = Window(_WINDOW_S)
        self._counters = RestartingCounters()
        self._events = EventList()
        self._view: View | None = None
        self._messages: dict[frozenset[str] | None, bytes] = {}  # of the present second, by visible services
        self._looked = asyncio.Event()  # set by the next look
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look at the cluster once a second until the server ends; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        expired = self._api.lifecycle.expired
        while not expired.is_set():
            try:
                self.look(time.time())
            except Exception:
                _log.exception("the page shows an old state")
            self._looked.set()
            self._looked = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(expired.wait(), _INTERVAL_S)
        self._looked.set()

    def look(self, now_s: float) -> None:
        """Take the present counters, and note what has changed since the last time."""
        backend = self._api.backend
        view = View.of(backend.engines, backend.services)
        if self._view is not None:
            for change in changes_between(self._view, view):
                self._events.add(change, now_s)
        self._view = view
        for engine in view.engines.values():
            self._count(engine)
        self._window.add(time.monotonic(), {**self._counters.totals(), **self._api.metrics.totals()})
        self._messages = {}

    async def watch(self, services: Set[str] | None) -> AsyncIterator[bytes]:
        """A server-sent event now, and one after every look, until the server ends.

        services: those that may be seen; None: all.
        """
        self.start()
        visible = None if services is None else frozenset(services)
        while not self._api.lifecycle.expired.is_set():
            yield self._message(visible)
            await self._looked.wait()

    def snapshot(self, visible: Set[str] | None = None) -> Snapshot:
        """The present state; visible: services that may be seen, None: all.

        Notes may name other services, so they are made of what may be seen.
        """
        shown = self._snapshot(visible).visible_to(visible)
        noted = [replace(service, note=note_of(service, shown.engines)) for service in shown.services]
        return replace(shown, services=noted)

    def _snapshot(self, visible: Set[str] | None) -> Snapshot:
        """visible: services whose requests are shown."""
        backend, api = self._api.backend, self._api
        statuses, services = backend.engines, backend.services
        engines = [Engine.of(engine, self._window) for engine in statuses]
        shown = []
        for name, status in services.items():
            served = api.services.get(name)
            chat = served is not None and api.tokenizer(name).has_chat_template
            model = name if served is None else served.model
            limits = backend.info.services.get(name)
            pinned = limits is not None and limits.pinned
            shown.append(Service.of(name, model, chat, pinned, status, statuses, self._window))
        table = backend.requests(_MAX_REQUESTS, visible)
        now_ns = time.time_ns()
        # Not once for all: the clocks drift apart when the time of day is set, or the machine sleeps.
        epoch_ns = now_ns - time.monotonic_ns()
        return Snapshot(
            round(now_ns / 1e9, 3),
            shoal.__version__,
            Health.of(statuses, services, api.lifecycle.draining).status,
            engines,
            shown,
            requests_of(table, epoch_ns),
            table.left_out,
            list(self._events),
        )

    def _message(self, visible: frozenset[str] | None) -> bytes:
        if visible not in self._messages:
            self._messages[visible] = b"data: " + encode(self.snapshot(visible)) + b"\n\n"
        return self._messages[visible]

    def _count(self, engine: EngineStatus) -> None:
        if engine.stats is None:
            return
        self._counters.add(engine.name, {("steps", engine.name): engine.stats.steps.count})
        for service, counted in engine.stats.services.items():
            counters = {
                ("output_tokens", service): counted.output_tokens,
                ("prompt_tokens", service): counted.prompt_tokens,
                ("preemptions", service): counted.preemptions,
                ("ended", service): counted.finished + counted.cancelled,
            }
            self._counters.add(engine.name, counters)
