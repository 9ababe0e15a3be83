"""Builds engines with fake models that kill their own process at a named stage of a migration.

The stage is in the fragment of the first service's model, and a file that says that it was reached before, as
in "fake#Stopped,/tmp/reached": nobody dies twice. Of a cluster's engines, which have one service, those die
that have ``MORTAL`` threads.
"""

import os
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from engine_builders import build_fake

from shoal.engine.core import Engine
from shoal.engine.info import EngineInfo
from shoal.engine.migration import wire as migration_wire
from shoal.engine.options import EngineOptions

BUILDER = "dying_engine:build_dying"
MORTAL = 3
SOURCE = ("Export", "read_blocks", "Stopped", "Release")
"""Stages of the source; as the next."""
DESTINATION = ("Reserve", "write_blocks", "Commit", "join")
BY_TOKENS = ("cancel", "submit")
"""Of the source, and of the destination, where only tokens move."""


def build_dying(
    options: EngineOptions, folders: Mapping[str, Path], *, progress=None
) -> tuple[Engine, EngineInfo]:
    """As ``build_fake``."""
    engine, info = build_fake(options, folders, progress=progress)
    stage, _, reached = options.services[0].model.partition("#")[2].partition(",")
    if options.threads != MORTAL or Path(reached).exists():
        return engine, info
    die = partial(_die, reached)
    executor, scheduler = engine._executor, engine._scheduler
    if stage in ("read_blocks", "write_blocks"):
        setattr(executor, stage, die)
    elif stage == "join":
        scheduler.join = die  # type: ignore[method-assign]
    elif stage == "cancel":
        engine.cancel = die  # type: ignore[method-assign]
    elif stage == "submit":
        _die_of_resumed(engine, die)
    elif stage == "Stopped":
        _die_after(engine, migration_wire.Stopped, die)
    else:
        _die_at_order(engine, stage, die)
    return engine, info


def _die(reached: str, *arguments: Any, **named: Any) -> Any:
    Path(reached).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def _die_at_order(engine: Engine, name: str, die: Callable[[], Any]) -> None:
    migrate = engine.migrate

    def dying(order: migration_wire.ToEngine) -> None:
        if type(order).__name__ == name:
            die()
        migrate(order)

    engine.migrate = dying  # type: ignore[method-assign]


def _die_after(engine: Engine, kind: type, die: Callable[[], Any]) -> None:
    """Die once a message has left."""
    connect = engine.connect

    def connecting(transfer: Any, emit: Callable[[Any], None]) -> None:
        def telling(message: Any) -> None:
            emit(message)
            if isinstance(message, kind):
                threading.Timer(0.02, die).start()

        connect(transfer, telling)

    engine.connect = connecting  # type: ignore[method-assign]


def _die_of_resumed(engine: Engine, die: Callable[[], Any]) -> None:
    submit = engine.submit

    def submitting(*requests: Any) -> None:
        if requests[0].num_output_tokens:
            die()
        submit(*requests)

    engine.submit = submitting  # type: ignore[method-assign]
