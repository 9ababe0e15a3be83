"""Kinds of configuration values: text, switch, choice, number with unit, list; parsers and doc labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol

from shoal.config.setting_tree import Listing, Node, Scalar, SettingError, Table, describe, problem
from shoal.core import ConfigError
from shoal.core.units import (
    format_byte_rate,
    format_duration,
    format_size,
    parse_byte_rate,
    parse_duration,
    parse_number,
    parse_size,
)

_TRUE = {"true", "yes", "on"}
_FALSE = {"false", "no", "off"}


class Kind(Protocol):
    """Reads one node as a value; raises ConfigError with place, key and the possible values."""

    @property
    def label(self) -> str:
        """Name of this kind in the documentation."""

    def read(self, node: Node, path: str) -> Any:
        """The value, in the unit of the option's field."""

    def show(self, value: Any) -> str:
        """A value as it would be written; for defaults in the documentation."""


class ScalarKind:
    """Base of kinds that are written as one scalar."""

    label: str
    expected: str

    def read(self, node: Node, path: str) -> Any:
        if not isinstance(node, Scalar) or node.text is None:
            raise problem(node.where, path, f"expected {self.expected}, got {describe(node)}")
        try:
            return self.parse(node.text)
        except ValueError as error:
            raise problem(node.where, path, str(error)) from None

    def parse(self, text: str) -> Any:
        """The value of ``text``; raises ValueError with the possible values."""
        raise NotImplementedError

    def show(self, value: Any) -> str:
        return str(value)


class Text(ScalarKind):
    """Any non-empty text."""

    label = "text"
    expected = "text"

    def parse(self, text: str) -> str:
        if not text.strip():
            raise ValueError("expected text, got an empty string")
        return text


class Switch(ScalarKind):
    label = "true or false"
    expected = "true or false"

    def parse(self, text: str) -> bool:
        """True for true, yes, on; False for false, no, off."""
        word = text.strip().lower()
        if word not in _TRUE | _FALSE:
            raise ValueError(f"expected true or false, got {text!r}")
        return word in _TRUE

    def show(self, value: Any) -> str:
        return str(value).lower()


@dataclass(frozen=True, slots=True)
class Choice(ScalarKind):
    names: tuple[str, ...]

    @property
    def label(self) -> str:  # type: ignore[override]
        return " or ".join(f"`{name}`" for name in self.names)

    @property
    def expected(self) -> str:  # type: ignore[override]
        return "one of " + ", ".join(self.names)

    def parse(self, text: str) -> str:
        if text not in self.names:
            raise ValueError(f"expected {self.expected}, got {text!r}{hint(text, self.names)}")
        return text


@dataclass(frozen=True, slots=True)
class Bounded(ScalarKind):
    """A number with a unit and a range; see the functions below."""

    label: str
    """Name in the documentation."""
    expected: str
    """Name in errors."""
    parser: Callable[[str], float]
    minimum: float | None = None
    maximum: float | None = None
    shower: Callable[[Any], str] = str
    above: float | None = None
    """Exclusive minimum."""

    def parse(self, text: str) -> Any:
        value = self.parser(text)
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"must be at least {self.shower(self.minimum)}, got {text}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"must be at most {self.shower(self.maximum)}, got {text}")
        if self.above is not None and value <= self.above:
            raise ValueError(f"must be more than {self.shower(self.above)}, got {text}")
        return value

    def show(self, value: Any) -> str:
        return self.shower(value)


def _parse_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected a whole number, got {text!r}") from None


def integer(minimum: int | None = None, maximum: int | None = None) -> Bounded:
    """A whole number within bounds."""
    return Bounded("whole number", "a whole number", _parse_int, minimum, maximum)


def number(minimum: float | None = None, maximum: float | None = None, above: float | None = None) -> Bounded:
    """A number, or a percentage, within bounds; above: exclusive minimum."""
    shower = "{:g}".format
    return Bounded(
        "number or percent", "a number or a percentage", parse_number, minimum, maximum, shower, above
    )


def size() -> Bounded:
    """A number of bytes, at least one."""
    return Bounded("size", "a size such as 2GiB", parse_size, 1, None, format_size)


def byte_rate() -> Bounded:
    """A positive number of bytes per second."""
    expected = "bytes per second such as 25GB"
    return Bounded("bytes per second", expected, parse_byte_rate, None, None, format_byte_rate, 0)


def seconds(above: float | None = None, minimum: float | None = None) -> Bounded:
    """A time, as seconds; above: exclusive minimum."""
    return Bounded("time", "a time such as 200ms", parse_duration, minimum, None, format_duration, above)


def nanoseconds() -> Bounded:
    """A time, as whole nanoseconds."""
    return Bounded(
        "time",
        "a time such as 200ms",
        lambda text: round(parse_duration(text) * 1e9),
        None,
        None,
        lambda value: format_duration(value / 1e9),
    )


@dataclass(frozen=True, slots=True)
class Maybe:
    """Another kind, or ``null``."""

    inner: Kind

    @property
    def label(self) -> str:
        return self.inner.label

    def read(self, node: Node, path: str) -> Any:
        """None for ``null``, else what the inner kind reads."""
        if isinstance(node, Scalar) and node.text is None:
            return None
        return self.inner.read(node, path)

    def show(self, value: Any) -> str:
        return "null" if value is None else self.inner.show(value)


@dataclass(frozen=True, slots=True)
class OrWord:
    """Another kind, or a word."""

    inner: Kind
    value: float | None
    """Value of the word: larger than any other, or None."""
    word: str = "never"

    @property
    def label(self) -> str:
        return f"{self.inner.label} or `{self.word}`"

    def read(self, node: Node, path: str) -> Any:
        """The value of the word, or what the inner kind reads."""
        if isinstance(node, Scalar) and node.text == self.word:
            return self.value
        try:
            return self.inner.read(node, path)
        except ConfigError as error:
            raise SettingError(f"{error}, or {self.word}", path) from None

    def show(self, value: Any) -> str:
        is_word = value is None if self.value is None else value >= self.value
        return self.word if is_word else self.inner.show(value)


@dataclass(frozen=True, slots=True)
class Several:
    """A list of another kind; a single value needs no brackets."""

    inner: Kind

    @property
    def label(self) -> str:
        return f"list of {self.inner.label}"

    def read(self, node: Node, path: str) -> tuple[Any, ...]:
        items = node.items if isinstance(node, Listing) else (node,)
        return tuple(self.inner.read(item, f"{path}[{index}]") for index, item in enumerate(items))

    def show(self, value: Any) -> str:
        return "[" + ", ".join(self.inner.show(item) for item in value) + "]"


@dataclass(frozen=True, slots=True)
class Template:
    """Jinja source, inline or in a file."""

    folder: Path | None
    """Base of relative paths; None: no files are read."""
    label: str = "Jinja text or path"

    def read(self, node: Node, path: str) -> str:
        """The Jinja source; text without braces is the path of a file with it."""
        text: str = Text().read(node, path)
        if "{" in text:
            return text
        if self.folder is None:
            raise problem(node.where, path, "write Jinja source, with braces; paths are not read here")
        file = (self.folder / Path(text).expanduser()).resolve()
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise problem(
                node.where,
                path,
                f"cannot read the template file {file}: {reason}; "
                "write Jinja source with braces, or the path of a file that holds it",
            ) from error

    def show(self, value: Any) -> str:
        return str(value)


def hint(word: str, possible: Sequence[str]) -> str:
    """``, did you mean 'x'?`` if a word in ``possible`` is similar, else ""."""
    near = get_close_matches(word, possible, n=1, cutoff=0.6)
    return f", did you mean '{near[0]}'?" if near else ""


def as_table(node: Node, path: str) -> Table:
    if isinstance(node, Table):
        return node
    if isinstance(node, Scalar) and node.text is None:
        return Table({}, node.where, {})
    raise problem(node.where, path, f"expected keys and values, got {describe(node)}")
