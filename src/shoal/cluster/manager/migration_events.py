"""Engines' messages about migrations, translated into manager events."""

from shoal.cluster.manager.events import (
    MigrationCopied,
    MigrationDeclined,
    MigrationEvent,
    MigrationFailed,
    MigrationNotExported,
    MigrationReserved,
    MigrationStopped,
)
from shoal.engine.migration import wire as migration_wire


def event_of(message: migration_wire.FromEngine) -> MigrationEvent:
    """The event of a message. ``Stopped`` carries more about the request, which the caller keeps."""
    migration = message.migration
    match message:
        case migration_wire.Reserved():
            return MigrationReserved(migration)
        case migration_wire.Declined():
            return MigrationDeclined(migration, message.why)
        case migration_wire.Copied():
            return MigrationCopied(migration)
        case migration_wire.Stopped():
            return MigrationStopped(migration)
        case migration_wire.NotExported():
            return MigrationNotExported(migration, message.why)
        case migration_wire.Failed():
            return MigrationFailed(migration, message.why)
