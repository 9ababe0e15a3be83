"""The grammars of requests: each has a place while a request needs it, and then as long as there is room."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from shoal.core import Grammar, InvalidRequest, QueueFull
from shoal.execute.grammar.fork_server import GrammarModel, GrammarTemplates
from shoal.execute.grammar.worker import GrammarWorker, StartGates

MAX_PROCESSES = 64
"""Grammars that may be in use at once."""
_COMPILERS = 4  # most wait for a process of the lowest priority
_END_TIMEOUT_S = 2.0

_Key = tuple[GrammarModel, Grammar]


class GrammarLease:
    """A place for a grammar: held from the acceptance of a request until its end, whether it runs or not."""

    def __init__(self, pool: "GrammarPool", key: _Key) -> None:
        self._pool = pool
        self.key = key
        """Whose it is."""
        self.ready: Future[None] = Future()
        """Done when the grammar can be followed; raises InvalidRequest where it cannot be used."""
        self.worker: GrammarWorker | None = None
        """Set by the pool; None: it waits for a place."""

    def release(self) -> None:
        """It is needed no more; to be called once."""
        self._pool.release(self)


class GrammarPool:
    """Workers by model and grammar; may be used by several threads. models: by service name.

    There are at most ``MAX_PROCESSES``. Those without a lease are kept, and make room for others.
    """

    def __init__(self, models: Mapping[str, GrammarModel]) -> None:
        self.answered = threading.Condition()
        """Notified after answers to questions."""
        self._models = dict(models)
        self._lock = threading.Lock()
        self._workers: OrderedDict[_Key, GrammarWorker] = OrderedDict()
        """Those that start or run, the one leased last at the end."""
        self._queue: deque[GrammarLease] = deque()
        """Those of requests accepted elsewhere, for which there was no room."""
        self._gates = StartGates(_COMPILERS)
        self._templates = GrammarTemplates(self._is_served)

    def lease(self, service: str, grammar: Grammar, *, accepted: bool = False) -> GrammarLease:
        """A place for the grammar of a request; returns at once.

        accepted: the request was accepted before, so it waits where there is no room, and goes before others.
        Raises QueueFull where too many others are in use.
        """
        model = self._models.get(service)
        if model is None:
            raise InvalidRequest(f"model {service!r} is not served here", "model", "model_not_found")
        lease = GrammarLease(self, (model, grammar))
        with self._lock:
            if self._give_place(lease, behind_queue=not accepted):
                return lease
            if not accepted:
                raise QueueFull(f"{MAX_PROCESSES} different grammars are in use, and no more may be", 1.0)
            self._queue.append(lease)
        return lease

    def release(self, lease: GrammarLease) -> None:
        """See ``GrammarLease``."""
        with self._lock:
            if lease.worker is None:
                self._queue.remove(lease)
            else:
                lease.worker.num_leases -= 1
                self._serve_queue()

    def find(self, service: str, grammar: Grammar) -> GrammarWorker | None:
        """Who follows a grammar that is leased."""
        return self._workers.get((self._models[service], grammar))

    def add_service(self, service: str, model: GrammarModel) -> None:
        """Requests of one more service may follow grammars."""
        self._models[service] = model

    def remove_service(self, service: str) -> None:
        """A service is gone: unless another has its model, all processes end that know it."""
        model = self._models.pop(service)
        if self._is_served(model):
            return
        with self._lock:
            for key in [key for key in self._workers if key[0] == model]:
                self._workers.pop(key).close()
            self._serve_queue()
        # One that starts may take seconds.
        threading.Thread(target=self._templates.end_unused, name="shoal-grammars", daemon=True).start()

    def close(self) -> None:
        """End all processes."""
        self._models.clear()
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.close()
        self._templates.close()
        for worker in workers:
            worker.join(_END_TIMEOUT_S)

    def _is_served(self, model: GrammarModel) -> bool:
        return model in list(self._models.values())  # a copy: other threads may change it meanwhile

    def _serve_queue(self) -> None:
        """Give places to those that wait, in their order, as far as there is room."""
        for lease in list(self._queue):
            if self._give_place(lease, behind_queue=False):
                self._queue.remove(lease)

    def _give_place(self, lease: GrammarLease, *, behind_queue: bool) -> bool:
        """Give a lease its worker, which may be a new one; whether there was room."""
        worker = self._workers.get(lease.key)
        if worker is not None and worker.failed and not worker.num_leases:
            self._workers.pop(lease.key).close()  # asked again, it is tried again
            worker = None
        if worker is None:
            if (behind_queue and self._queue) or not self._make_room():
                return False
            model, grammar = lease.key
            fork = partial(self._templates.fork, model)
            worker = self._workers[lease.key] = GrammarWorker(grammar, fork, self._gates, self.answered)
        self._workers.move_to_end(lease.key)
        worker.num_leases += 1
        lease.worker = worker
        worker.compiled.add_done_callback(partial(_pass_on, lease.ready))
        return True

    def _make_room(self) -> bool:
        """Whether one more may be in use; ends one that nobody needs, of those the one used longest ago."""
        if len(self._workers) < MAX_PROCESSES:
            return True
        for key, worker in self._workers.items():
            if not worker.num_leases:
                self._workers.pop(key).close()
                return True
        return False


def _pass_on(ready: Future[None], compiled: Future[None]) -> None:
    error = compiled.exception()
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)
