"""Executors: running the scheduler's plans with torch, or in simulated time.

This room has the executor protocol, the torch executor (model loading, paged attention, sampling, grammars)
and the simulated one. The scheduler decides which plan to run. Importing this package does not import torch;
`shoal.execute.model.model_set` and `shoal.execute.torch_executor` do.
"""

import os

from shoal.execute.protocol import Executor

# Torch reads both once, when it is imported. Threads that spin while they wait occupy cores that working
# threads need when another program is busy, and each of the hundreds of waits in a step then lasts a time
# slice. But waking a thread takes as long as many parts of a step, so libgomp's threads spin for some 20 to
# 70 microseconds before they sleep.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ.setdefault("GOMP_SPINCOUNT", "1500")

__all__ = ["Executor"]
