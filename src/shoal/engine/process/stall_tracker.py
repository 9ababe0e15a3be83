"""What is seen of a process while nothing shows that it gets on.

Time alone says little: on a busy machine everything takes long. A process that was stopped, or waits for what
never comes, uses no CPU time. One that is slow uses its share, however small. One that goes round in circles
uses more than anything plausible.
"""

LEAST_SHARE = 1 / 300
"""A process that uses less of a core than this stands still: some of its threads only look around."""

BUSY_LOOP_FACTOR = 20.0
"""What uses CPU time gets so many times the limit of what uses none."""


class StallTracker:
    """Adds up time and CPU time since the last progress."""

    def __init__(self) -> None:
        self.progress()

    def progress(self) -> None:
        """It got on: all begins anew."""
        self.took_s = self.cpu_s = 0.0
        """Since the last progress."""
        self.mark()

    def mark(self) -> None:
        """It works, which is not progress."""
        self.still_s = self.still_cpu_s = 0.0
        """Of the time in which it has stood still until now."""

    def look(self, since_s: float, cpu_s: float) -> None:
        """Count the time since the last look, and the CPU time that was used meanwhile."""
        self.took_s += since_s
        self.cpu_s += cpu_s
        self.still_s += since_s
        self.still_cpu_s += cpu_s
        if self.still_cpu_s > LEAST_SHARE * self.still_s:
            self.mark()
