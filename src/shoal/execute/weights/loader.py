"""WeightLoader: a thread that reads the weights of images into their memory, one image after the other."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from shoal.core import Arrival
from shoal.execute.weights.image import Place, WeightImage, read_weights

_FileState = tuple[int, int, int]
"""Number, size and time of modification, in nanoseconds."""


class _Stopped(Exception):
    """The order was cancelled, or the loader closed."""


@dataclass(slots=True, eq=False)
class _Order:
    name: str
    image: WeightImage
    cancelled: bool = False


class WeightLoader:
    """Fetches weights while other threads compute; no method but ``close`` waits.

    bandwidth: limit in bytes per second on each fetch; None: no limit. clock: seconds. wait: sleeps for some
    seconds, and returns whether the loader was closed meanwhile.
    """

    def __init__(
        self,
        bandwidth: float | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._bandwidth = bandwidth
        self._clock = clock
        self._closed = threading.Event()
        self._wait = wait or self._closed.wait
        self._queue: SimpleQueue[_Order | None] = SimpleQueue()
        self._checked: dict[Path, _FileState] = {}
        """Files whose checksums were right."""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Guards what follows, and the places of images that are coming. It is not held while reading."""
        self._orders: dict[str, _Order] = {}
        """Those that have not arrived, by name."""
        self._arrivals: list[Arrival] = []

    @property
    def arrived(self) -> bool:
        """Whether ``arrivals`` has something to return."""
        return bool(self._arrivals)

    def fetch(self, name: str, image: WeightImage) -> None:
        """Read absent weights, behind those that are being read; ``arrivals`` reports them as ``name``."""
        order = _Order(name, image)
        with self._lock:
            image.place = Place.COMING
            self._orders[name] = order
        if self._thread is None:
            # A daemon, as it may be within a slow read when the process ends.
            self._thread = threading.Thread(target=self._run, name="shoal-weights", daemon=True)
            self._thread.start()
        self._queue.put(order)

    def arrivals(self) -> list[Arrival]:
        """The weights that came, or could not be read, since the last call."""
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def forget(self, name: str) -> None:
        """Do not read these weights any more, and do not report them."""
        with self._lock:
            self._arrivals = [arrival for arrival in self._arrivals if arrival.weights != name]
            order = self._orders.pop(name, None)
            if order is not None:
                order.cancelled = True
                order.image.place = Place.ABSENT

    def close(self) -> None:
        """Stop reading; waits for the chunk that is being read."""
        self._closed.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    # No function of torch is called in the thread: if the process ends meanwhile, a thread that waits for the
    # interpreter inside of one aborts the process.
    def _run(self) -> None:
        while (order := self._queue.get()) is not None and not self._closed.is_set():
            started = self._clock()
            error: str | None = None
            try:
                self._read(order, started)
            except _Stopped:
                error = "the engine ends"
            except Exception as problem:
                error = str(problem) or type(problem).__name__
            self._finish(order, Arrival(order.name, self._clock() - started, error))

    def _finish(self, order: _Order, arrival: Arrival) -> None:
        if arrival.error is not None:
            order.image.memory.release()
        with self._lock:
            if not order.cancelled:
                del self._orders[order.name]
                order.image.place = Place.RESIDENT if arrival.error is None else Place.ABSENT
                self._arrivals.append(arrival)
                return
        order.image.memory.release()

    def _read(self, order: _Order, started: float) -> None:
        """Read all chunks; raises OSError or ValueError if the file is not the one that was written."""
        path = order.image.weights_file
        found = os.fstat(order.image.file)
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        read_weights(
            order.image,
            check=self._checked.get(path) != state,
            pace=lambda num_bytes: self._pace(order, started, num_bytes),
        )
        self._checked[path] = state

    def _pace(self, order: _Order, started: float, num_bytes: int) -> None:
        """Wait until ``num_bytes`` may have come; raises _Stopped."""
        pause = 0.0 if self._bandwidth is None else started + num_bytes / self._bandwidth - self._clock()
        stopped = self._wait(pause) if pause > 0 else self._closed.is_set()
        if stopped or order.cancelled:
            raise _Stopped
