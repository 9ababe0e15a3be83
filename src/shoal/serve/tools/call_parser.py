"""Finds calls of tools in the text of an output, one character at a time."""

import json
from collections.abc import Callable, Collection, Generator
from typing import ClassVar, TypeVar

from shoal.frontend.detokenize import StopStrings
from shoal.serve.tools.output_pieces import CallArguments, CallBegin, Content, Piece, join_pieces

_END = ""
_ARGUMENTS = ("arguments", "parameters")

Value = TypeVar("Value")
Reading = Generator[None, str, Value]
"""A reader that is sent characters, and then returns a value."""


class NotACall(Exception):
    """What looked like a call is none, or a call does not go on as one, from the character read last on."""


class OutputEnded(Exception):
    """The output ends within a call, or within what looked like one."""


class CallParser:
    """Splits an output into content and calls. The base class of the parsers of all formats.

    ``markers`` begin a call, as does an object right at the beginning if ``bare``. From there on, text is
    held back until the name of the call is known, and is content after all if the text does not go on as a
    call. After that, whatever comes in place of the arguments belongs to the call. Blanks between
    calls and content are dropped, and so is the beginning of a call at the end of an output that was cut.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    end_marker: ClassVar[str] = ""
    """What may follow a call, and is no content then."""
    separators: ClassVar[str] = ""
    """Characters that may be between two bare calls."""
    bare: ClassVar[bool] = False
    doubtful: ClassVar[tuple[str, ...]] = ()
    """Markers that begin other things as well."""

    def __init__(self, names: Collection[str], only_calls: bool = False) -> None:
        """names: of the tools. A call without a marker must have one of them.

        only_calls: a grammar allows nothing else, so the rest is markup, and dropped.
        """
        self._names = names
        self._only_calls = only_calls
        self._pieces: list[Piece] = []
        self._held: list[str] = []  # what is content if this is not a call
        self._blanks: list[str] = []  # blanks that are content if more content follows
        self._last = _END  # the character read last
        self._spoken = False  # whether there was content
        self._calls = 0
        self._in_call = False  # whether the name of the call is known
        self._after_call = False  # whether only blanks came since a call
        strings = (*self.markers, self.end_marker) if self.end_marker else self.markers
        self._marker = StopStrings(strings)
        self._begins = {text[0] for text in strings}
        self._waiting = 0  # characters that may be the beginning of a marker
        self._reading = False  # whether a marker has come
        self.ends_in_call = False
        """As in OutputParser."""
        self._cut = False  # whether the output has ended, but the model has not ended it
        self._machine = self._run()
        next(self._machine)

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain after some more text."""
        if self._is_plain(text):
            self._say(text)
        else:
            for character in text:
                self._machine.send(character)
        return self._take()

    def _is_plain(self, text: str) -> bool:
        """Whether no call can begin in ``text``, so that its characters need not be looked at."""
        elsewhere = self._reading or self._waiting or self._after_call or (self.bare and not self._spoken)
        return not elsewhere and not any(character in text for character in self._begins)

    def finish(self, cut: bool = False) -> list[Piece]:
        """What was held back, now that the output has ended; cut: but the model has not ended it."""
        self._cut = cut
        self._machine.send(_END)
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = join_pieces(self._pieces), []
        return [piece for piece in pieces if not (self._only_calls and isinstance(piece, Content))]

    def _run(self) -> Reading[None]:
        character: str | None = yield
        while character != _END:
            if character is None:  # a new one is needed
                character = yield
                continue
            marker = self._look_for_marker(character)
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
            self._say(self._marker.release())
        if not self._calls:
            self._pieces += [Content(blank) for blank in self._blanks]
        yield

    def _look_for_marker(self, character: str) -> str | None:
        """The marker that ``character`` completes, if it does; else it is content, or held back."""
        text = self._marker.push(character)
        self._waiting += 1 - len(text)
        if self.bare and not self._spoken and text == character and character in "{[":
            return character
        self._say(text)
        found, self._marker.found = self._marker.found, None
        if found is None:
            return None
        self._waiting = 0
        if found in self.markers:
            return found
        if self._after_call:
            self._blanks.clear()
        else:
            self._say(found)
        return None

    def _say(self, text: str) -> None:
        if self._after_call and all(c.isspace() or c in self.separators for c in text):
            self._blanks.append(text)
            return
        said = text.rstrip()
        if said:
            self._pieces += map(Content, (*self._blanks, said))
            self._blanks = []
            self._spoken, self._after_call = True, False
        if len(said) < len(text):
            self._blanks.append(text[len(said) :])

    def _stop_reading(self) -> str:
        """End a call early, or say what turned out to be none; returns the character to go on with."""
        if self._in_call:
            self._end_call()
            return self._last
        held, self._held = "".join(self._held), []
        if not (self._cut and self._is_certain(held)):
            # The first character cannot begin another call, nor can markers within.
            self._say(held[: len(held) - len(self._last)])
        return self._last

    def _is_certain(self, held: str) -> bool:
        """Whether ``held`` begins a call beyond doubt: it follows one, or more than a marker is there."""
        if held.startswith(self.doubtful):
            return False
        marker = next(filter(held.startswith, self.markers), held)
        return self._after_call or bool(held.removeprefix(marker).strip())

    def _read_calls(self, marker: str) -> Reading[str | None]:
        """Read what follows ``marker``: one call or several. Returns a character that is not part of them."""
        bare = len(marker) == 1
        character = marker if bare else (yield from self._after_blanks())
        yield from self._read_objects(character, known_names_only=bare)
        return None

    def _read_objects(self, character: str, known_names_only: bool) -> Reading[None]:
        """Read a call as an object, or a list of them, from ``character`` on."""
        if character != "[":
            yield from self._read_object(character, known_names_only)
            return
        while character != "]":
            character = yield from self._after_blanks()
            yield from self._read_object(character, known_names_only)
            self._held = []
            character = yield from self._after_blanks()
            if character not in ",]":
                raise NotACall

    def _read_object(self, character: str, known_name_only: bool) -> Reading[None]:
        """Read ``{"name": ..., "arguments": {...}}`` from ``character`` on, in any order."""
        if character != "{":
            raise NotACall
        name: str | None = None
        early: list[str] = []  # arguments that come before the name
        character = yield from self._after_blanks()
        while character != "}":
            key, character = yield from self._read_key(character)
            if key == "name" and name is None and character == '"':
                name = yield from self._read_string()
                character = yield from self._after_blanks()
            elif key in _ARGUMENTS and not self._in_call and not early:
                if name is not None:
                    self._begin_call(name, known_name_only)
                character = yield from self._read_arguments(character, early.append if name is None else None)
            else:
                character = yield from self._read_value(character, lambda text: None)
            if character.isspace():
                character = yield from self._after_blanks()
            if character == ",":
                character = yield from self._after_blanks()
            elif character != "}":
                raise NotACall
        if not self._in_call:
            if name is None or (known_name_only and not early):
                raise NotACall
            self._begin_call(name, known_name_only)
            self._argue("".join(early) or "{}")
        self._end_call()

    def _read_key(self, character: str) -> Reading[tuple[str, str]]:
        """A key from its quote on, and the first character of its value."""
        if character != '"':
            raise NotACall
        key = yield from self._read_string()
        if (yield from self._after_blanks()) != ":":
            raise NotACall
        return key, (yield from self._after_blanks())

    def _begin_call(self, name: str, known_name_only: bool = False) -> None:
        if not name or (known_name_only and name not in self._names):
            raise NotACall
        self._pieces.append(CallBegin(name))
        self._held, self._blanks = [], []
        self._in_call = True
        self._calls += 1

    def _argue(self, text: str) -> None:
        self._pieces.append(CallArguments(text))

    def _end_call(self) -> None:
        self._in_call, self._after_call = False, True

    def _read_arguments(self, character: str, write: Callable[[str], None] | None = None) -> Reading[str]:
        """Read arguments from ``character`` on and write them as JSON; returns the character after them.

        They may be JSON within a string, too.
        """
        write = write or self._argue
        if character not in '"n':
            return (yield from self._read_value(character, write))
        raw: list[str] = []
        character = yield from self._read_value(character, raw.append)
        text = "".join(raw)
        write("{}" if text == "null" else _unquote(text) if text[0] == '"' else text)
        return character

    def _read_string(self) -> Reading[str]:
        """A string after its opening quote."""
        raw = ['"']
        while True:
            character = yield from self._read()
            raw.append(character)
            if character == "\\":
                raw.append((yield from self._read()))
            elif character == '"':
                return _unquote("".join(raw))

    def _read_value(self, character: str, write: Callable[[str], None]) -> Reading[str]:
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
            if character == "<":  # never in JSON: an end marker comes before its time
                raise NotACall
            write(character)
            if character == '"':
                yield from self._copy_string(write)
            depth += (character in "{[") - (character in "}]")
            character = yield from self._read()
            if depth <= 0:
                return character

    def _copy_string(self, write: Callable[[str], None]) -> Reading[None]:
        """Write the rest of a string after its opening quote."""
        character = ""
        while character != '"':
            character = yield from self._read()
            write(character)
            if character == "\\":
                write((yield from self._read()))

    def _after_blanks(self) -> Reading[str]:
        """The next character that is not blank."""
        while (character := (yield from self._read())).isspace():
            pass
        return character

    def _expect(self, text: str) -> Reading[None]:
        """Read exactly ``text``, after blanks."""
        character = yield from self._after_blanks()
        if character != text[0]:
            raise NotACall
        for expected in text[1:]:
            if (yield from self._read()) != expected:
                raise NotACall

    def _read_until(self, end: str) -> Reading[str]:
        """The text before the next ``end``, one character, which is read as well."""
        text = ""
        while (character := (yield from self._read())) != end:
            text += character
        return text

    def _read(self) -> Reading[str]:
        """The next character."""
        character = yield
        if character == _END:
            raise OutputEnded
        self._last = character
        if not self._in_call:
            self._held.append(character)
        return character


def _unquote(raw: str) -> str:
    """The text of a JSON string; ``raw`` itself where it is not valid."""
    try:
        text: str = json.loads(raw, strict=False)
        text.encode()
    except ValueError:
        return raw
    return text
