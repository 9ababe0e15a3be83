"""Pool of grammar workers: leases for requests' grammars, a limit on processes, eviction of unused ones."""

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial

from shoal.core import Grammar, QueueFull
from shoal.core.errors import model_not_found
from shoal.execute.grammar.fork_server import ForkServers, GrammarModel
from shoal.execute.grammar.worker import CompileGates, GrammarWorker

MAX_PROCESSES = 64
"""Most grammars that may be in use at once."""
_MAX_TRIALS = 4  # they mostly wait for processes of the lowest priority
_END_TIMEOUT_S = 2.0

_Key = tuple[GrammarModel, Grammar]


class GrammarLease:
    """A lease of a grammar's worker, held from the acceptance of a request until its end."""

    def __init__(self, pool: "GrammarPool", key: _Key) -> None:
        self._pool = pool
        self.key = key
        self.ready: Future[None] = Future()
        """Done when the grammar is compiled; raises InvalidRequest if it cannot be used."""
        self.worker: GrammarWorker | None = None
        """Set by the pool; None while the lease is queued."""

    def release(self) -> None:
        """End the lease; must be called exactly once."""
        self._pool.release(self)


class GrammarPool:
    """Workers by model and grammar, at most ``MAX_PROCESSES``; thread-safe. models: by service name.

    Workers without a lease are kept until their place is needed; the least recently leased is evicted first.
    """

    def __init__(self, models: Mapping[str, GrammarModel]) -> None:
        self.answered = threading.Condition()
        """Notified when mask requests are done."""
        self._models = dict(models)
        self._lock = threading.Lock()
        self._workers: OrderedDict[_Key, GrammarWorker] = OrderedDict()
        """Started workers, least recently leased first."""
        self._queue: deque[GrammarLease] = deque()
        """Leases of already accepted requests that wait for a free place."""
        self._gates = CompileGates(_MAX_TRIALS)
        self._fork_servers = ForkServers(self._is_served)

    def lease(self, service: str, grammar: Grammar, *, accepted: bool = False) -> GrammarLease:
        """Lease the grammar of a request; returns at once.

        accepted: the request was accepted before (by another engine): if there is no room, the lease is
        queued, ahead of new requests. Raises QueueFull if too many grammars are in use.
        """
        model = self._models.get(service)
        if model is None:
            raise model_not_found(service, self._models)
        lease = GrammarLease(self, (model, grammar))
        with self._lock:
            if self._assign_worker(lease, behind_queue=not accepted):
                return lease
            if not accepted:
                raise QueueFull(f"{MAX_PROCESSES} different grammars are in use, and no more may be", 1.0)
            self._queue.append(lease)
        return lease

    def release(self, lease: GrammarLease) -> None:
        """End a lease; see ``GrammarLease``."""
        with self._lock:
            if lease.worker is None:
                self._queue.remove(lease)
            else:
                lease.worker.num_leases -= 1
                self._serve_queue()

    def find(self, service: str, grammar: Grammar) -> GrammarWorker | None:
        return self._workers.get((self._models[service], grammar))

    def add_service(self, service: str, model: GrammarModel) -> None:
        self._models[service] = model

    def remove_service(self, service: str) -> None:
        """Unregister a service; ends the processes of its model unless another service has the same model."""
        model = self._models.pop(service)
        if self._is_served(model):
            return
        with self._lock:
            for key in [key for key in self._workers if key[0] == model]:
                self._workers.pop(key).close()
            self._serve_queue()
        # In a thread, since it waits for a fork server that is starting, which takes seconds.
        threading.Thread(target=self._fork_servers.end_unused, name="shoal-grammars", daemon=True).start()

    def close(self) -> None:
        self._models.clear()
        with self._lock:
            workers = list(self._workers.values())
            self._workers.clear()
        for worker in workers:
            worker.close()
        self._fork_servers.close()
        for worker in workers:
            worker.join(_END_TIMEOUT_S)

    def _is_served(self, model: GrammarModel) -> bool:
        return model in list(self._models.values())  # a copy, since other threads may change it

    def _serve_queue(self) -> None:
        """Assign workers to queued leases, in order, while there is room."""
        for lease in list(self._queue):
            if self._assign_worker(lease, behind_queue=False):
                self._queue.remove(lease)

    def _assign_worker(self, lease: GrammarLease, *, behind_queue: bool) -> bool:
        """Assign a worker to a lease, if need be a new one; returns whether there was room."""
        worker = self._workers.get(lease.key)
        if worker is not None and worker.failed and not worker.num_leases:
            self._workers.pop(lease.key).close()  # retry the grammar for the new lease
            worker = None
        if worker is None:
            if (behind_queue and self._queue) or not self._make_room():
                return False
            model, grammar = lease.key
            fork = partial(self._fork_servers.fork, model)
            worker = self._workers[lease.key] = GrammarWorker(grammar, fork, self._gates, self.answered)
        self._workers.move_to_end(lease.key)
        worker.num_leases += 1
        lease.worker = worker
        worker.compiled.add_done_callback(partial(_copy_result, lease.ready))
        return True

    def _make_room(self) -> bool:
        """Whether there is room for a worker; evicts the least recently leased unused one if need be."""
        if len(self._workers) < MAX_PROCESSES:
            return True
        for key, worker in self._workers.items():
            if not worker.num_leases:
                self._workers.pop(key).close()
                return True
        return False


def _copy_result(ready: Future[None], compiled: Future[None]) -> None:
    error = compiled.exception()
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)
