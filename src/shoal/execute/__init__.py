"""Executors: what runs the scheduler's plans.

Here belong the executor protocol, the torch executor (model loading, paged attention, sampling) and
tensor views of the KV pool. Which plan to run is decided elsewhere. Importing this package imports no
torch; `shoal.execute.loading` and `shoal.execute.torch_executor` do.
"""

import os

from shoal.execute.protocol import Executor

# Read once, when torch is imported. Threads that wait for others by spinning take the cores that these
# need where another program is busy too, and each of the hundreds of waits in a step lasts a time slice.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = ["Executor"]
