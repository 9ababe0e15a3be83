"""The process that owns the engines of a host: ``python -m shoal.cluster.node``.

``engines`` starts, hears and kills them; ``server`` is what the process is to the one server that uses it,
with the messages of ``wire``; ``folder`` is where both meet. Nothing here needs torch or numpy, so that the
process is small and starts quickly.
"""

from shoal.cluster.node.engine_processes import (
    EngineExited,
    EngineSaid,
    EngineUsage,
    Node,
    NodeEvent,
    RunningEngine,
)

__all__ = ["EngineExited", "EngineSaid", "EngineUsage", "Node", "NodeEvent", "RunningEngine"]
