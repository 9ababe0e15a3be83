"""Content blocks of an answer to /v1/messages, and the stream events of their changes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shoal.serve.openai.chat_fields import Json
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, Piece, Reasoning


class OutputBlocks:
    """The blocks of one answer, built from its pieces. call_id: makes the id of a call."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._open = False
        self._arguments = ""
        """JSON text of the arguments of the last call, as far as it has come."""
        self.blocks: list[Json] = []
        """All blocks; the last may be unfinished."""

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add(self, pieces: Sequence[Piece]) -> Iterator[Json]:
        """Append pieces; yields the events."""
        for piece in pieces:
            match piece:
                case Content():
                    yield from self._add_text("text", piece.text)
                case Reasoning():
                    yield from self._add_text("thinking", piece.text)
                case CallBegin():
                    yield from self.close()
                    self._arguments = ""
                    call = {"type": "tool_use", "id": self._call_id(), "name": piece.name, "input": {}}
                    yield self._begin(call)
                case CallArguments():
                    self._arguments += piece.text
                    yield self._delta("input_json_delta", partial_json=piece.text)

    def close(self) -> Iterator[Json]:
        """End the last block, if it is open; yields the event."""
        if not self._open:
            return
        self._open = False
        block = self.blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _arguments_object(self._arguments)
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        if not self._open or self.blocks[-1]["type"] != kind:
            yield from self.close()
            # Clients expect a signature, which only servers that sign their reasoning have.
            yield self._begin({"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {}))
        self.blocks[-1][kind] += text
        yield self._delta(f"{kind}_delta", **{kind: text})

    def _begin(self, block: Json) -> Json:
        self._open = True
        self.blocks.append(block)
        return {
            "type": "content_block_start",
            "index": len(self.blocks) - 1,
            "content_block": dict(block),
        }

    def _delta(self, kind: str, **fields: Any) -> Json:
        return {
            "type": "content_block_delta",
            "index": len(self.blocks) - 1,
            "delta": {"type": kind, **fields},
        }


def _arguments_object(text: str) -> Json:
    """The arguments of a call; none if they were cut off, or are no object."""
    try:
        arguments = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return {}
    return arguments if isinstance(arguments, dict) else {}
