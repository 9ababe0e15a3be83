"""Long-running operations of operators, such as adding a service: start, state, history."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from shoal.core import InvalidRequest, ShoalError
from shoal.serve.admin.cluster_responses import Operation
from shoal.serve.errors import OPERATION_NOT_FOUND, Conflict

_HISTORY = 100
_INTERNAL = "internal error; the server's log has the details"
_log = logging.getLogger(__name__)

Work = Callable[[Operation], Coroutine[Any, Any, None]]
"""Does the work of an operation, and updates its progress."""


class Operations:
    """Running operations, and the last that ended.

    An operation continues after its request. Each target has at most one running operation.
    """

    def __init__(self) -> None:
        self._operations: dict[str, Operation] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def all(self) -> list[Operation]:
        """All operations, in order of their start."""
        return list(self._operations.values())

    def find(self, id: str) -> Operation:
        """The operation ``id``; raises InvalidRequest (404)."""
        if id not in self._operations:
            raise InvalidRequest(
                f"there is no operation {id!r}; the last {_HISTORY} that ended are kept",
                code=OPERATION_NOT_FOUND,
            )
        return self._operations[id]

    def start(self, kind: str, target: str, work: Work, *, ends: str | None = None) -> Operation:
        """Start ``work``; raises Conflict while another operation on the target is running.

        kind: ends with the kind of target, such as ``add_service``. ends: operations of this kind may be
        running, since the work ends them.
        """
        self.check_free(kind, target, ends)
        operation = Operation(id=str(next(self._numbers)), kind=kind, target=target, started=time.time())
        self._operations[operation.id] = operation
        _log.info("operation %s: %s %s", operation.id, kind, target)
        task = asyncio.create_task(self._run(operation, work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    def check_free(self, kind: str, target: str, ends: str | None = None) -> None:
        """Raise Conflict while an operation on the target is running, of another kind than ``ends``."""
        target_kind = kind.rpartition("_")[2]
        for other in self._operations.values():
            if other.state != "running" or other.kind == ends:
                continue
            if (other.kind.rpartition("_")[2], other.target) == (target_kind, target):
                raise Conflict(
                    f"operation {other.id} ({other.kind}) on {target_kind} {target!r} is still running; "
                    "wait for it"
                )

    async def _run(self, operation: Operation, work: Work) -> None:
        try:
            await work(operation)
        except asyncio.CancelledError:
            operation.state, operation.error = "failed", "the server ended"
            raise
        except ShoalError as error:
            operation.state, operation.error = "failed", str(error)
        except Exception:
            _log.exception("operation %s failed", operation.id)
            operation.state, operation.error = "failed", _INTERNAL
        else:
            operation.state = "done"
        finally:
            operation.ended = time.time()
            self._forget_old()
        level = logging.INFO if operation.error is None else logging.WARNING
        what = f"{operation.kind} {operation.target}: {operation.error or 'done'}"
        _log.log(level, "operation %s: %s", operation.id, what)

    def _forget_old(self) -> None:
        ended = [id for id, operation in self._operations.items() if operation.state != "running"]
        for id in ended[: max(0, len(ended) - _HISTORY)]:
            del self._operations[id]
