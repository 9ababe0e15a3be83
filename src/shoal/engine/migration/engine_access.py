"""The parts of an engine that migrations use: scheduler, KV pool, executor, transfer, replies."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.core import StepPlan
from shoal.engine import wire
from shoal.engine.migration.transfer import KVTransfer
from shoal.execute.protocol import Executor
from shoal.kvcache import BlockPool
from shoal.schedule import Scheduler


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """An engine between two steps, while no plan is in flight."""

    scheduler: Scheduler
    pool: BlockPool
    executor: Executor
    transfer: KVTransfer
    send: Callable[[wire.FromEngine], None]
    """Sends to the client, after the events of all finished steps."""
    now_ns: Callable[[], int]

    def run(self, plan: StepPlan) -> None:
        """Run a plan without sequences: copies, and sequences that leave."""
        self.executor.submit(plan)
        self.executor.collect()
