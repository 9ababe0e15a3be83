"""What engines say of migrations, as a manager is told it."""

from shoal.cluster.manager.events import (
    MoveCopied,
    MoveDeclined,
    MoveEvent,
    MoveFailed,
    MoveNotExported,
    MoveReserved,
    MoveStopped,
)
from shoal.engine.migration import wire as migration_wire


def event_of(message: migration_wire.FromEngine) -> MoveEvent:
    """The event that a message means. Who tells it keeps what ``Stopped`` says of the request."""
    migration = message.migration
    match message:
        case migration_wire.Reserved():
            return MoveReserved(migration)
        case migration_wire.Declined():
            return MoveDeclined(migration, message.why)
        case migration_wire.Copied():
            return MoveCopied(migration)
        case migration_wire.Stopped():
            return MoveStopped(migration)
        case migration_wire.NotExported():
            return MoveNotExported(migration, message.why)
        case migration_wire.Failed():
            return MoveFailed(migration, message.why)
