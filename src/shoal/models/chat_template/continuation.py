"""``continue_final_message``: cutting a rendered prompt after the content of the last message."""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from shoal.core import InvalidRequest

_FIELD = "continue_final_message"


def cut_after_last_content(
    text: str, messages: Sequence[dict[str, Any]], write: Callable[[Sequence[dict[str, Any]]], str]
) -> str:
    """The beginning of ``text``, which is ``write(messages)``, up to the end of the last message's content.

    The content may occur elsewhere in the text, too, so it is rendered a second time with a mark at its end.
    Templates may strip its whitespace; raises InvalidRequest if they change anything else in it.
    """
    content = messages[-1].get("content")
    if content is None:
        raise InvalidRequest("the last message has no content, so it cannot be continued", param=_FIELD)
    mark = next(mark for number in count() if (mark := f"EndOfContent{number}.") not in text)
    marked = write([*messages[:-1], {**messages[-1], "content": content + mark}])
    before, found, after = marked.rpartition(mark)
    before = before.replace(mark, "")  # the content may occur before, too
    if found and not content.strip():
        return before  # the template may omit text around an empty content
    beginning = text[: len(text) - len(after)]
    shown = beginning.rstrip().endswith(content.strip()) and beginning + after == text
    if not found or not shown or _visible(beginning) != _visible(before):
        raise InvalidRequest(
            "the model's chat template does not show the content of the last message as it is, so that it"
            " cannot be continued",
            param=_FIELD,
        )
    return beginning


def _visible(text: str) -> str:
    return "".join(text.split())
