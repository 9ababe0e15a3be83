"""Output items of /v1/responses, and the stream events of their changes."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from shoal.serve.openai.response_bodies import ChatTokenLogprob
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, Piece, Reasoning

Json = dict[str, Any]


class OutputItems:
    """The items of one response, built from its pieces."""

    def __init__(self, call_id: Callable[[], str]) -> None:
        self._call_id = call_id
        self._open = False
        self._waiting: list[ChatTokenLogprob] = []  # log-probabilities of tokens whose text is held back
        self.items: list[Json] = []
        """All items; the last may be unfinished."""

    def add(self, pieces: Sequence[Piece], logprobs: Sequence[ChatTokenLogprob] = ()) -> Iterator[Json]:
        """Append pieces; yields the events. logprobs: of their tokens; only messages keep them."""
        self._waiting += logprobs
        for piece in pieces:
            match piece:
                case Content():
                    yield from self._add_text("message", piece.text)
                case Reasoning():
                    self._waiting = []
                    yield from self._add_text("reasoning", piece.text)
                case CallBegin():
                    yield from self.close()
                    yield from self._begin(
                        {
                            "type": "function_call",
                            "id": f"fc_{secrets.token_hex(12)}",
                            "call_id": self._call_id(),
                            "name": piece.name,
                            "arguments": "",
                            "status": "in_progress",
                        }
                    )
                case CallArguments():
                    self._waiting = []
                    self.items[-1]["arguments"] += piece.text
                    yield self._event("function_call_arguments.delta", delta=piece.text)

    def close(self, status: str = "completed") -> Iterator[Json]:
        """End the last item, if it is open; yields the events.

        A call with complete arguments gets the status "completed" in any case: the output was cut after it.
        """
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        is_complete_call = item["type"] == "function_call" and _is_json(item["arguments"])
        item["status"] = "completed" if is_complete_call else status
        if item["type"] == "function_call":
            yield self._event("function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        else:
            (part,) = item["content"]
            logprob_fields = {}
            if item["type"] == "message":
                part["logprobs"] += self._waiting
                logprob_fields = {"logprobs": part["logprobs"]}
            yield self._event(f"{part['type']}.done", content_index=0, text=part["text"], **logprob_fields)
            yield self._event("content_part.done", content_index=0, part=part)
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _add_text(self, kind: str, text: str) -> Iterator[Json]:
        if not self._open or self.items[-1]["type"] != kind:
            yield from self.close()
            yield from self._begin_text(kind)
        (part,) = self.items[-1]["content"]
        part["text"] += text
        logprob_fields = {}
        if kind == "message":
            part["logprobs"] += self._waiting
            logprob_fields, self._waiting = {"logprobs": self._waiting}, []
        yield self._event(f"{part['type']}.delta", content_index=0, delta=text, **logprob_fields)

    def _begin_text(self, kind: str) -> Iterator[Json]:
        if kind == "message":
            item: Json = {"type": kind, "id": f"msg_{secrets.token_hex(12)}", "role": "assistant"}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": kind, "id": f"rs_{secrets.token_hex(12)}", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        yield from self._begin(item | {"status": "in_progress", "content": []})
        yield self._event("content_part.added", content_index=0, part=dict(part))
        self.items[-1]["content"].append(part)

    def _begin(self, item: Json) -> Iterator[Json]:
        self._open = True
        self.items.append(item)
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Json:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    @property
    def reasoning(self) -> str:
        """The text of all reasoning items."""
        texts = (
            part["text"] for item in self.items if item["type"] == "reasoning" for part in item["content"]
        )
        return "\n".join(texts)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True
