"""Executors: what runs the scheduler's plans.

Here belong the executor protocol, the torch executor (model loading, paged attention, sampling) and
tensor views of the KV pool. Which plan to run is decided elsewhere. Importing this package imports no
torch; `shoal.execute.model.loading` and `shoal.execute.torch_executor` do.
"""

import os

from shoal.execute.protocol import Executor

# Both are read once, when torch is imported; they are for what torch computes itself. Threads that wait for
# others by spinning take the cores that these need where another program is busy too, and each of the
# hundreds of waits in a step lasts a time slice. But waking a thread up takes as long as many of a step's
# parts: so libgomp's threads look for the next part for some 20 to 70 microseconds before they sleep.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")

__all__ = ["Executor"]
