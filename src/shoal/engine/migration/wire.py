"""Wire messages of KV migrations between a client and the source and destination engines.

The request runs on the source before, on the destination after the migration. Migration ids are never reused.
The KV itself goes directly from the source to the destination (``transfer``).
"""

import msgspec

from shoal.core import Request, ResumeState


class Reserve(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: reserve blocks for a request; the reply is Reserved or Declined."""

    migration: str
    service: str
    tokens: int
    """Length of the request now, prompt and output; it grows during the copy."""


class Export(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: send a running request's KV. Replies: Copied repeatedly, then Stopped or NotExported."""

    migration: str
    request_id: str
    to: str
    """The destination's address for KV, from its Ready message."""
    live: bool
    """Whether the request keeps running until the last round; else it is stopped first."""


class Commit(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: the request of a migration, which runs as soon as all of its KV is there.

    The only reply is the request's events, or Failed.
    """

    migration: str
    request: Request
    """With its output, its new id, and the ``resume_state`` of Stopped."""
    computed: int
    """Leading tokens with KV, from Stopped."""


class Abort(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: end the export; a stopped request resumes from its KV. An unknown migration is ignored.

    The reply is Refused where the new id is in use, else none.
    """

    migration: str
    request_id: str | None = None
    """The request's new id; None: unchanged."""


class Release(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the source: end the export, and drop a stopped request. An unknown migration is ignored."""

    migration: str


class Drop(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """To the destination: free the reserved blocks.

    After a Commit the reply is Failed; but if the request runs already, the message is ignored.
    """

    migration: str
    request_id: str | None = None
    """The id in the Commit; None: no Commit was sent."""


class Reserved(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: blocks are reserved, and KV can be sent."""

    migration: str


class Declined(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: there are no blocks for the request."""

    migration: str
    why: str


class Copied(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source: progress of an export of which more blocks follow."""

    migration: str
    blocks: int
    """Blocks sent so far."""


class Stopped(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source, after the request's last event: the request is stopped, and all of its KV is sent.

    Its blocks are kept until Abort or Release.
    """

    migration: str
    output_tokens: int
    """Output tokens in all events of the request."""
    computed: int
    """Leading tokens whose KV is sent."""
    resume_state: ResumeState
    """Counters and ages, to resume the request with."""


class NotExported(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the source: the export has failed; the request, if it is known, continues there."""

    migration: str
    why: str


class Failed(msgspec.Struct, tag=True, array_like=True, frozen=True):
    """From the destination: a Commit failed, and nothing of the request is kept."""

    migration: str
    why: str


ToEngine = Reserve | Export | Commit | Abort | Release | Drop
FromEngine = Reserved | Declined | Copied | Stopped | NotExported | Failed
