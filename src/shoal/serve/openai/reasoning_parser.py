"""Reasoning in outputs: what the model writes for itself before it answers."""

from collections.abc import Callable

from shoal.serve.tools.output_pieces import Content, OutputParser, Piece, Reasoning

_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
ReasoningTags = tuple[str, str]
"""What begins and what ends reasoning."""


def reasoning_tags(template: str) -> ReasoningTags | None:
    """How the model with this chat template marks reasoning; None if it does not."""
    return next((marks for marks in _MARKS if marks[1] in template), None)


def opens_reasoning(prompt: str, marks: ReasoningTags) -> bool:
    """Whether ``prompt`` ends where reasoning has just begun."""
    return prompt.rstrip().endswith(marks[0])


class ReasoningParser:
    """Splits an output into reasoning, which can only come first, and what ``inner`` makes of the rest.

    Blanks around the reasoning are dropped.
    """

    def __init__(self, marks: ReasoningTags, opened: bool, inner: OutputParser) -> None:
        """opened: the prompt has the mark that begins the reasoning."""
        self._begin, self._end = marks
        self._inner = inner
        self._held = ""  # what may be blanks to drop, or the beginning of a mark
        self._read: Callable[[str], list[Piece]] = self._reason if opened else self._look_for_begin
        self._reasoned = False  # whether there was reasoning that is not blank

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain after some more text."""
        return self._read(text)

    def finish(self, cut: bool = False) -> list[Piece]:
        """What was held back, now that the output has ended; cut: but the model has not ended it."""
        held, self._held = self._held, ""
        reasons = self._read == self._reason
        pieces: list[Piece] = [Reasoning(held.rstrip())] if reasons and held.strip() else []
        return pieces + ([] if reasons else self._inner.push(held)) + self._inner.finish(cut)

    @property
    def ends_in_call(self) -> bool:
        """As in OutputParser."""
        return self._inner.ends_in_call

    def _look_for_begin(self, text: str) -> list[Piece]:
        self._held += text
        seen = self._held.lstrip()
        if seen.startswith(self._begin):
            self._held, self._read = "", self._reason
            return self._reason(seen[len(self._begin) :])
        if self._begin.startswith(seen):
            return []
        held, self._held, self._read = self._held, "", self._inner.push
        return self._inner.push(held)

    def _reason(self, text: str) -> list[Piece]:
        text, self._held = self._held + text, ""
        if not self._reasoned:
            text = text.lstrip()
        reasoning, mark, rest = text.partition(self._end)
        if not mark:
            shown = len(text) - _begun(text, self._end)
            shown = len(text[:shown].rstrip())
            reasoning, self._held = text[:shown], text[shown:]
        self._reasoned = self._reasoned or bool(reasoning)
        reasoning = reasoning.rstrip()
        pieces: list[Piece] = [Reasoning(reasoning)] if reasoning else []
        if mark:
            self._read = self._skip_blanks
            pieces += self._skip_blanks(rest)
        return pieces

    def _skip_blanks(self, text: str) -> list[Piece]:
        text = text.lstrip()
        if not text:
            return []
        self._read = self._inner.push
        return self._inner.push(text)


def _begun(text: str, mark: str) -> int:
    """How much of ``mark`` ``text`` ends with."""
    return next((size for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), 0)


class ContentParser:
    """Everything is content."""

    ends_in_call = False
    """As in OutputParser."""

    def push(self, text: str) -> list[Piece]:
        """``text`` as it is."""
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> list[Piece]:
        """Nothing."""
        return []
