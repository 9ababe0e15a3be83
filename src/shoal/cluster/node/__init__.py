"""The node process, which owns a host's engines and survives the server: ``python -m shoal.cluster.node``.

``engine_processes`` starts, watches and kills them; ``attachment`` lets one server at a time use them;
``server`` is the socket for it, with the messages of ``wire``, in the node's ``folder``. Nothing here imports
torch or numpy, so that the process is small and starts quickly.
"""

from shoal.cluster.node.engine_processes import (
    EngineExited,
    EngineMessage,
    EngineUsage,
    Node,
    NodeEvent,
    RunningEngine,
)

__all__ = ["EngineExited", "EngineMessage", "EngineUsage", "Node", "NodeEvent", "RunningEngine"]
