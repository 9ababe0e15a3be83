"""Parses tool calls in the text of an output, incrementally: the base class of all formats' parsers."""

import json
from collections.abc import Callable, Collection, Generator
from typing import ClassVar, TypeVar

from shoal.frontend.detokenize import StopStrings
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, Piece, join_pieces

_END = ""
_ARGUMENTS = ("arguments", "parameters")

Value = TypeVar("Value")
Reader = Generator[None, str, Value]
"""A coroutine that receives characters, and returns a value."""


class NotACall(Exception):
    """The text is not a call, or stops being one at the character read last."""


class OutputEnded(Exception):
    """The output ended within a call, or within a text that may be one."""


class CallParser:
    """Splits an output into content and calls.

    A call begins with one of ``markers``, or, if ``bare``, with a JSON object at the start of the output.
    From there, text is held back until the call's name is complete; if it is not a call, it becomes content.
    Later text belongs to the call's arguments, valid or not. Whitespace between calls and content is dropped,
    and so is a call at the end of an output that was cut before its name was complete.

    names: of the tools; a call without a marker must have one of them. only_calls: a grammar forces calls, so
    everything else is markup and dropped.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    end_marker: ClassVar[str] = ""
    """May follow a call, and is then not content."""
    separators: ClassVar[str] = ""
    """Characters that may separate two bare calls."""
    bare: ClassVar[bool] = False
    """Whether a call may come without a marker."""
    ambiguous_markers: ClassVar[tuple[str, ...]] = ()
    """Markers that may also begin ordinary text."""

    def __init__(self, names: Collection[str], only_calls: bool = False) -> None:
        self._names = names
        self._only_calls = only_calls
        self._pieces: list[Piece] = []
        self._held: list[str] = []  # text that becomes content if this is not a call
        self._blanks: list[str] = []  # whitespace that becomes content if more content follows
        self._last = _END  # the character read last
        self._has_content = False
        self._calls = 0
        self._in_call = False  # whether a call's name is complete and its arguments are not
        self._after_call = False  # whether only whitespace followed the last call
        strings = (*self.markers, self.end_marker) if self.end_marker else self.markers
        self._marker = StopStrings(strings)
        self._first_characters = {text[0] for text in strings}
        self._waiting = 0  # number of characters that may begin a marker
        self._reading = False  # whether text after a marker is being read
        self.ends_in_call = False
        self._cut = False  # whether the output was ended by something else than the model
        self._state_machine = self._run()
        next(self._state_machine)

    def push(self, text: str) -> list[Piece]:
        if self._is_plain(text):
            self._add_content(text)
        else:
            for character in text:
                self._state_machine.send(character)
        return self._take_pieces()

    def _is_plain(self, text: str) -> bool:
        """Whether no call can begin in ``text``, so that it can skip the state machine."""
        in_other_state = (
            self._reading or self._waiting or self._after_call or (self.bare and not self._has_content)
        )
        return not in_other_state and not any(character in text for character in self._first_characters)

    def finish(self, cut: bool = False) -> list[Piece]:
        self._cut = cut
        self._state_machine.send(_END)
        return self._take_pieces()

    def _take_pieces(self) -> list[Piece]:
        pieces, self._pieces = join_pieces(self._pieces), []
        return [piece for piece in pieces if not (self._only_calls and isinstance(piece, Content))]

    def _run(self) -> Reader[None]:
        character: str | None = yield
        while character != _END:
            if character is None:
                character = yield
                continue
            marker = self._find_marker(character)
            if marker is None:
                character = None
                continue
            self._held, self._reading = [marker], True
            try:
                character = yield from self._read_calls(marker)
            except NotACall:
                character = self._stop_reading()
            except OutputEnded:
                self._last, self.ends_in_call = _END, self._in_call
                character = self._stop_reading()
            self._reading = False
        if not (self._cut and self._after_call):
            self._add_content(self._marker.release())
        if not self._calls:
            self._pieces += [Content(blank) for blank in self._blanks]
        yield

    def _find_marker(self, character: str) -> str | None:
        """The marker that ``character`` completes; None: the character is content, or held back."""
        text = self._marker.push(character)
        self._waiting += 1 - len(text)
        if self.bare and not self._has_content and text == character and character in "{[":
            return character
        self._add_content(text)
        found, self._marker.found = self._marker.found, None
        if found is None:
            return None
        self._waiting = 0
        if found in self.markers:
            return found
        if self._after_call:
            self._blanks.clear()
        else:
            self._add_content(found)
        return None

    def _add_content(self, text: str) -> None:
        if self._after_call and all(c.isspace() or c in self.separators for c in text):
            self._blanks.append(text)
            return
        stripped = text.rstrip()
        if stripped:
            self._pieces += map(Content, (*self._blanks, stripped))
            self._blanks = []
            self._has_content, self._after_call = True, False
        if len(stripped) < len(text):
            self._blanks.append(text[len(stripped) :])

    def _stop_reading(self) -> str:
        """End an incomplete call, or turn held text into content; returns the character to continue with."""
        if self._in_call:
            self._end_call()
            return self._last
        held, self._held = "".join(self._held), []
        if not (self._cut and self._is_surely_call(held)):
            # Neither the first character nor markers within can begin another call.
            self._add_content(held[: len(held) - len(self._last)])
        return self._last

    def _is_surely_call(self, held: str) -> bool:
        """Whether ``held`` is surely the beginning of a call: it follows a call, or is more than a marker."""
        if held.startswith(self.ambiguous_markers):
            return False
        marker = next(filter(held.startswith, self.markers), held)
        return self._after_call or bool(held.removeprefix(marker).strip())

    def _read_calls(self, marker: str) -> Reader[str | None]:
        """Read the calls after ``marker``. Returns the next character if it was read already."""
        bare = len(marker) == 1
        character = marker if bare else (yield from self._next_nonblank())
        yield from self._read_objects(character, known_names_only=bare)
        return None

    def _read_objects(self, character: str, known_names_only: bool) -> Reader[None]:
        """Read a JSON object that is a call, or a list of such objects, from ``character`` on."""
        if character != "[":
            yield from self._read_object(character, known_names_only)
            return
        while character != "]":
            character = yield from self._next_nonblank()
            yield from self._read_object(character, known_names_only)
            self._held = []
            character = yield from self._next_nonblank()
            if character not in ",]":
                raise NotACall

    def _read_object(self, character: str, known_name_only: bool) -> Reader[None]:
        """Read ``{"name": ..., "arguments": {...}}`` from ``character`` on, with keys in any order."""
        if character != "{":
            raise NotACall
        name: str | None = None
        early: list[str] = []  # arguments that come before the name
        character = yield from self._next_nonblank()
        while character != "}":
            key, character = yield from self._read_key(character)
            if key == "name" and name is None and character == '"':
                name = yield from self._read_string()
                character = yield from self._next_nonblank()
            elif key in _ARGUMENTS and not self._in_call and not early:
                if name is not None:
                    self._begin_call(name, known_name_only)
                character = yield from self._read_arguments(character, early.append if name is None else None)
            else:
                character = yield from self._read_value(character, lambda text: None)
            if character.isspace():
                character = yield from self._next_nonblank()
            if character == ",":
                character = yield from self._next_nonblank()
            elif character != "}":
                raise NotACall
        if not self._in_call:
            if name is None or (known_name_only and not early):
                raise NotACall
            self._begin_call(name, known_name_only)
            self._add_arguments("".join(early) or "{}")
        self._end_call()

    def _read_key(self, character: str) -> Reader[tuple[str, str]]:
        """A key from its quote on, and the first character of its value."""
        if character != '"':
            raise NotACall
        key = yield from self._read_string()
        if (yield from self._next_nonblank()) != ":":
            raise NotACall
        return key, (yield from self._next_nonblank())

    def _begin_call(self, name: str, known_name_only: bool = False) -> None:
        if not name or (known_name_only and name not in self._names):
            raise NotACall
        self._pieces.append(CallBegin(name))
        self._held, self._blanks = [], []
        self._in_call = True
        self._calls += 1

    def _add_arguments(self, text: str) -> None:
        self._pieces.append(CallArguments(text))

    def _end_call(self) -> None:
        self._in_call, self._after_call = False, True

    def _read_arguments(self, character: str, write: Callable[[str], None] | None = None) -> Reader[str]:
        """Read arguments from ``character`` on and write them as JSON; returns the character after them.

        They may also be a string that contains JSON.
        """
        write = write or self._add_arguments
        if character not in '"n':
            return (yield from self._read_value(character, write))
        raw: list[str] = []
        character = yield from self._read_value(character, raw.append)
        text = "".join(raw)
        write("{}" if text == "null" else _unquote(text) if text[0] == '"' else text)
        return character

    def _read_string(self) -> Reader[str]:
        """A string after its opening quote."""
        raw = ['"']
        while True:
            character = yield from self._read()
            raw.append(character)
            if character == "\\":
                raw.append((yield from self._read()))
            elif character == '"':
                return _unquote("".join(raw))

    def _read_value(self, character: str, write: Callable[[str], None]) -> Reader[str]:
        """Write a JSON value from ``character`` on as it is; returns the character after it.

        Brackets and quotes are matched, nothing else is checked.
        """
        if character not in '{["':
            while character not in ",}]<" and not character.isspace():
                write(character)
                character = yield from self._read()
            return character
        depth = 0
        while True:
            if character == "<":  # not JSON: an early end marker
                raise NotACall
            write(character)
            if character == '"':
                yield from self._copy_string(write)
            depth += (character in "{[") - (character in "}]")
            character = yield from self._read()
            if depth <= 0:
                return character

    def _copy_string(self, write: Callable[[str], None]) -> Reader[None]:
        """Write the rest of a string after its opening quote."""
        character = ""
        while character != '"':
            character = yield from self._read()
            write(character)
            if character == "\\":
                write((yield from self._read()))

    def _next_nonblank(self) -> Reader[str]:
        """The next character that is not whitespace."""
        while (character := (yield from self._read())).isspace():
            pass
        return character

    def _expect(self, text: str) -> Reader[None]:
        """Read exactly ``text``, after whitespace."""
        character = yield from self._next_nonblank()
        if character != text[0]:
            raise NotACall
        for expected in text[1:]:
            if (yield from self._read()) != expected:
                raise NotACall

    def _read_until(self, end: str) -> Reader[str]:
        """The text before the next character ``end``, which is read as well."""
        text = ""
        while (character := (yield from self._read())) != end:
            text += character
        return text

    def _read(self) -> Reader[str]:
        """The next character; raises OutputEnded."""
        character = yield
        if character == _END:
            raise OutputEnded
        self._last = character
        if not self._in_call:
            self._held.append(character)
        return character


def _unquote(raw: str) -> str:
    """The text of a JSON string; ``raw`` itself if it is invalid."""
    try:
        text: str = json.loads(raw, strict=False)
        text.encode()
    except ValueError:
        return raw
    return text
