"""CPU time of a process without progress, by which the hang detector and the supervisor judge it.

Wall time alone says little: on a busy machine everything takes long. A process that is stopped, or waits for
something that never happens, uses no CPU time. A slow process uses its share, however small. A process in an
endless loop uses more than is plausible.
"""

MIN_CPU_SHARE = 1 / 300
"""A process that uses less of a core than this is stalled: some of its threads only poll."""

BUSY_LOOP_FACTOR = 20.0
"""A process that uses CPU time may take this many times the limit of a stalled one."""


class StallTracker:
    """Adds up time and CPU time since the last progress."""

    def __init__(self) -> None:
        self.progress()

    def progress(self) -> None:
        """The process made progress: start over."""
        self.took_s = self.cpu_s = 0.0
        """Since the last progress."""
        self.mark()

    def mark(self) -> None:
        """The process works, which is not progress: restart the stalled time."""
        self.still_s = self.still_cpu_s = 0.0
        """Wall and CPU time of the present stall."""

    def observe(self, since_s: float, cpu_s: float) -> None:
        """Add the wall and CPU time since the last call."""
        self.took_s += since_s
        self.cpu_s += cpu_s
        self.still_s += since_s
        self.still_cpu_s += cpu_s
        if self.still_cpu_s > MIN_CPU_SHARE * self.still_s:
            self.mark()
