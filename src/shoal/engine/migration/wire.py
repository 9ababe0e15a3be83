"""The messages about requests that move between engines with their KV.

The source engine runs the request at first, the destination in the end. A migration's id is never used twice.
The KV itself goes from one engine to the other (``transfer``).
"""

import msgspec

from shoal.core import Request, ResumeState


class Reserve(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: keep room for a request, and send Reserved or Declined."""

    migration: str
    """The migration's id."""
    service: str
    """The service that it asks."""
    tokens: int
    """Its length now, prompt and output; it grows while it is copied."""


class Export(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: send a running request's KV; Copied comes after each part, at last Stopped.

    NotExported comes instead of Stopped where nothing was done to it.
    """

    migration: str
    """The migration's id."""
    request_id: str
    """The request."""
    to: str
    """Where the destination takes KV: as it told when it was ready."""
    live: bool
    """It goes on while its KV is sent, but for the last of it; else it is stopped first."""


class Commit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: the KV is this request's, which runs there as soon as all of it has come.

    There is no answer but its events, or Failed.
    """

    migration: str
    """The migration's id."""
    request: Request
    """With its output, under its new id, and carrying what Stopped told."""
    computed: int
    """Leading tokens whose KV is sent: as Stopped told."""


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: send no more; a request that was stopped runs again, from its KV. Unknown: ignored.

    Refused comes where its id is in use.
    """

    migration: str
    """The migration's id."""
    request_id: str | None = None
    """Its new id; None: as before."""


class Release(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: send no more, and forget a request that was stopped. Unknown: ignored."""

    migration: str
    """The migration's id."""


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: give up the room.

    Where a Commit was sent, the answer is Failed, unless its request runs: then nothing is done.
    """

    migration: str
    """The migration's id."""
    request_id: str | None = None
    """The id of the Commit's request; None: none was sent."""


class Reserved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: there is room, and KV may come."""

    migration: str
    """The migration's id."""


class Declined(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: there is no room."""

    migration: str
    """The migration's id."""
    why: str
    """Why, in words."""


class Copied(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source, between two steps in which some was sent: how much, and that more is to come."""

    migration: str
    """The migration's id."""
    blocks: int
    """Blocks sent so far."""


class Stopped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source, behind the request's last event: it runs no longer, and the last of its KV is sent.

    Its blocks are kept until Abort or Release.
    """

    migration: str
    """The migration's id."""
    output_tokens: int
    """How many its events have told, in all."""
    computed: int
    """Leading tokens whose KV is sent."""
    resume_state: ResumeState
    """What was counted of it."""


class NotExported(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source: the export is over, and nothing was done to the request, if it is there at all."""

    migration: str
    """The migration's id."""
    why: str
    """Why, in words."""


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: a Commit failed, and it has nothing of the request."""

    migration: str
    """The migration's id."""
    why: str
    """Why, in words."""


ToEngine = Reserve | Export | Commit | Abort | Release | Drop
FromEngine = Reserved | Declined | Copied | Stopped | NotExported | Failed
