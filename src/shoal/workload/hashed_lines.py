"""JSON lines with hashes of shared prefixes: the common part of Mooncake's and Bailian's formats."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.workload.lines import get_member, json_lines, line_error, parse_float, parse_int
from shoal.workload.rows import LARGEST_S, TraceRow

CHAT, PARENT = "chat_id", "parent_chat_id"
"""Members of Bailian's lines that Mooncake's lack; CHAT is in every line."""


@dataclass(frozen=True, slots=True)
class HashedLines:
    """One format: its units, and its example for errors."""

    ns_per_unit: int
    """Nanoseconds in the unit of ``timestamp``."""
    hash_tokens: int
    """Tokens per hash of ``hash_ids``."""
    like: str
    """An example line."""
    has_chats: bool = False
    """Whether every line has CHAT, or none, which distinguishes the formats."""
    least_output: int = 1
    """0 if the trace has requests without an output."""
    others: str = ""
    """Hint in errors for numbers that are valid only in the other format."""

    def read(self, path: Path) -> Iterator[tuple[dict[str, Any], TraceRow]]:
        """Members and row of every line; ``hash_ids`` may be missing."""
        for line, record in json_lines(path, self.like):
            if (CHAT in record) != self.has_chats:
                wrong = (
                    f"no {CHAT!r}"
                    if self.has_chats
                    else f"{CHAT!r}, so it is Bailian's, with times in seconds"
                )
                raise line_error(path, line, wrong, f"an object like {self.like}")
            prompt, output = (
                parse_int(get_member(record, name, path, line, self.like), name, path, line, least)
                for name, least in (("input_length", 1), ("output_length", 0))
            )
            if output < self.least_output:
                expected = f"at least {self.least_output}{self.others}"
                raise line_error(path, line, f"output_length is '{output}'", expected)
            arrival = self._arrival(get_member(record, "timestamp", path, line, self.like), path, line)
            hashes = self._hashes(record.get("hash_ids", []), prompt, path, line)
            yield record, TraceRow(arrival, prompt, output, hashes=hashes, hash_tokens=self.hash_tokens)

    def _arrival(self, value: object, path: Path, line: int) -> int:
        latest = LARGEST_S * 1e9 / self.ns_per_unit
        units = parse_float(value, "timestamp", path, line, 0.0, latest)
        return value * self.ns_per_unit if isinstance(value, int) else round(units * self.ns_per_unit)

    def _hashes(self, value: object, prompt: int, path: Path, line: int) -> tuple[int, ...]:
        size = self.hash_tokens
        most = -(-prompt // size)
        expected = f"a list of whole numbers, at most {most} for {prompt} tokens in blocks of {size}"
        if not isinstance(value, list):
            raise line_error(path, line, f"hash_ids is {str(value)[:80]!r}", expected)
        if any(type(number) is not int for number in value):
            raise line_error(path, line, "hash_ids has something else than numbers", expected)
        if len(value) > most:
            raise line_error(path, line, f"{len(value)} hash_ids", expected + self.others)
        return tuple(value)
