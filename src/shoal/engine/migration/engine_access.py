"""What is needed of an engine to move requests to others and from them."""

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
    """Its scheduler."""
    pool: BlockPool
    """Its KV pool."""
    executor: Executor
    """Its executor."""
    transfer: KVTransfer
    """Where KV comes and goes."""
    tell: Callable[[wire.FromEngine], None]
    """Sends to the client, behind the events of all steps that have ended."""
    now_ns: Callable[[], int]
    """Its clock."""

    def run(self, plan: StepPlan) -> None:
        """Carry out a plan without rows."""
        self.executor.submit(plan)
        self.executor.collect()
