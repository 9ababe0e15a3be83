"""Executors: what runs the scheduler's plans.

Here belong the executor protocol, the torch executor (model loading, paged attention, sampling) and
tensor views of the KV pool. Which plan to run is decided elsewhere. Importing this package imports no
torch; `shoal.execute.loading` and `shoal.execute.torch_executor` do.
"""

from shoal.execute.protocol import Executor

__all__ = ["Executor"]
