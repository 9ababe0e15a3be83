"""Makes the kept changes of operators again, after the start of a server."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from functools import partial

from shoal.config.setting_tree import Table, node_of
from shoal.core import ShoalError
from shoal.serve.admin.cluster_admin import ClusterAdmin
from shoal.serve.admin.cluster_responses import Operation
from shoal.serve.admin.kept_changes import AddedEngine, AddedService, Changes

_log = logging.getLogger(__name__)
_POLL_S = 0.05
Start = Callable[[], Operation]
"""Starts an operation."""


async def restore_changes(admin: ClusterAdmin) -> None:
    """Make the kept changes again, one after the other, each as an operation.

    One that fails is logged and stays kept: a model may be missing for a while only.
    """
    kept = admin.kept
    words = kept.now.in_words()
    if not words:
        return
    _log.info(
        "changes of operators are made again (%s; delete it to begin with the configuration alone): %s",
        kept.file,
        "; ".join(words),
    )
    configured = [engine.name for engine in admin.engines()]
    kept.forget_unknown([service.name for service in admin.services()], configured)
    for what, start in list(_operations(admin, kept.now)):
        try:
            operation = start()
            while operation.state == "running":
                await asyncio.sleep(_POLL_S)
            error = operation.error
        except ShoalError as refused:
            error = str(refused)
        except Exception:
            _log.exception("%s", what)
            error = "internal error"
        if error is not None:
            _log.warning("a change of operators could not be made again: %s: %s", what, error)


def _operations(admin: ClusterAdmin, now: Changes) -> Iterator[tuple[str, Start]]:
    """What is to be done, in words and as starts of operations: first what adds, last what takes away.

    What was added under the name of something that was removed comes in its place.
    """
    engines = {each.name for each in now.added if isinstance(each, AddedEngine)}
    services = {each.name for each in now.added if isinstance(each, AddedService)}
    for name in now.removed_services:
        if name in services:
            yield f"remove service {name}", partial(admin.remove_service, name)
    for name in now.removed_engines:
        if name in engines:
            yield f"remove engine {name}", partial(admin.remove_engine, name)
    for each in now.added:
        if isinstance(each, AddedService):
            yield f"add service {each.name}", partial(admin.add_service, each.service, each.engines)
        else:
            settings = node_of(each.settings, "the kept changes")
            assert isinstance(settings, Table)
            yield f"add engine {each.name}", partial(admin.add_engine, settings)
    for name, pinned in now.pins.items():
        yield (
            f"pin service {name}" if pinned else f"unpin service {name}",
            partial(admin.pin_service, name, pinned),
        )
    for name, chosen in now.placements.items():
        yield f"place service {name} on {', '.join(chosen)}", partial(admin.place_service, name, chosen)
    for name in now.removed_services:
        if name not in services:
            yield f"remove service {name}", partial(admin.remove_service, name)
    for name, how in now.left.items():
        leave = admin.drain_engine if how == "drained" else admin.deactivate_engine
        yield f"engine {name}: {how}", partial(leave, name)
    for name in now.removed_engines:
        if name not in engines:
            yield f"remove engine {name}", partial(admin.remove_engine, name)
