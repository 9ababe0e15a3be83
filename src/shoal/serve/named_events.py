"""Server-sent events with names, which are the types of their JSON."""

_TYPE = b'{"type":"'


def named_event(payload: bytes) -> bytes:
    """The event of a JSON object that begins with its ``type``."""
    name = payload[len(_TYPE) : payload.index(b'"', len(_TYPE))]
    return b"event: " + name + b"\ndata: " + payload + b"\n\n"
