"""Splits reasoning (<think>...</think>) from the rest of an output."""

from collections.abc import Callable

from shoal.serve.tools.output_pieces import Content, OutputParser, Piece, Reasoning

_TAGS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
ReasoningTags = tuple[str, str]
"""The tags before and after reasoning."""


def reasoning_tags(template: str) -> ReasoningTags | None:
    """The reasoning tags of the model with this chat template; None: it has none."""
    return next((tags for tags in _TAGS if tags[1] in template), None)


def opens_reasoning(prompt: str, tags: ReasoningTags) -> bool:
    """Whether ``prompt`` ends with the tag that begins reasoning."""
    return prompt.rstrip().endswith(tags[0])


class ReasoningParser:
    """Splits an output into reasoning, which can only come first, and the rest, which ``inner`` parses.

    Whitespace around the reasoning is dropped. is_open: the prompt already has the tag that begins reasoning.
    """

    def __init__(self, tags: ReasoningTags, is_open: bool, inner: OutputParser) -> None:
        self._begin, self._end = tags
        self._inner = inner
        self._held = ""  # whitespace that may be dropped, or the beginning of a tag
        self._push: Callable[[str], list[Piece]] = self._read_reasoning if is_open else self._find_begin
        self._has_reasoning = False  # whether there was reasoning other than whitespace

    def push(self, text: str) -> list[Piece]:
        return self._push(text)

    def finish(self, cut: bool = False) -> list[Piece]:
        held, self._held = self._held, ""
        in_reasoning = self._push == self._read_reasoning
        pieces: list[Piece] = [Reasoning(held.rstrip())] if in_reasoning and held.strip() else []
        return pieces + ([] if in_reasoning else self._inner.push(held)) + self._inner.finish(cut)

    @property
    def ends_in_call(self) -> bool:
        return self._inner.ends_in_call

    def _find_begin(self, text: str) -> list[Piece]:
        self._held += text
        seen = self._held.lstrip()
        if seen.startswith(self._begin):
            self._held, self._push = "", self._read_reasoning
            return self._read_reasoning(seen[len(self._begin) :])
        if self._begin.startswith(seen):
            return []
        held, self._held, self._push = self._held, "", self._inner.push
        return self._inner.push(held)

    def _read_reasoning(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        if not self._has_reasoning:
            text = text.lstrip()
        reasoning, tag, rest = text.partition(self._end)
        if not tag:
            certain = len(text) - _partial_tag_length(text, self._end)
            certain = len(text[:certain].rstrip())
            reasoning, self._held = text[:certain], text[certain:]
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        reasoning = reasoning.rstrip()
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if tag:
            self._push = self._skip_whitespace
            pieces += self._skip_whitespace(rest)
        return pieces

    def _skip_whitespace(self, text: str) -> list[Piece]:
        text = text.lstrip()
        if not text:
            return []
        self._push = self._inner.push
        return self._inner.push(text)


def _partial_tag_length(text: str, tag: str) -> int:
    """Length of the longest beginning of ``tag`` with which ``text`` ends."""
    return next((size for size in range(len(tag) - 1, 0, -1) if text.endswith(tag[:size])), 0)


class ContentParser:
    """Treats a whole output as content."""

    ends_in_call = False

    def push(self, text: str) -> list[Piece]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        return []
