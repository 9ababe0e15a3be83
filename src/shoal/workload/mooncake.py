"""Trace format: Mooncake's traces (Qin et al., FAST 2025), JSON lines with hashes of shared prefixes.

Workloads are exported in this format, too, because it keeps everything about a request.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from shoal.core import ConfigError
from shoal.workload.hashed_lines import CHAT, HashedLines
from shoal.workload.lines import ReadOptions
from shoal.workload.prefixes import block_hashes
from shoal.workload.rows import MOONCAKE_BLOCK, TraceRow

_LIKE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}'
_BAILIAN = f"; lines of Bailian's traces (seconds, blocks of 16 tokens, answers of 0) need {CHAT!r}"
_LINES = HashedLines(ns_per_unit=10**6, hash_tokens=MOONCAKE_BLOCK, like=_LIKE, others=_BAILIAN)


def read_mooncake(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with times in milliseconds; ``hash_ids`` and the members below may be missing.

    The client is ``client`` or ``session_id``; ``client``, ``service`` and ``request_id`` are Shoal's
    members.
    """
    for record, row in _LINES.read(path):
        yield replace(
            row,
            client=_text(record.get("client", record.get("session_id"))),
            request_id=_text(record.get("request_id")),
            service=_text(record.get("service")),
        )


def write_mooncake(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write rows, one line each; ``read_trace`` gives them back.

    Times are milliseconds, with a fraction if needed. Hashes of blocks other than 512 tokens become hashes of
    full blocks of 512 tokens, with equal sharing in units of 512. Raises ConfigError for rows without
    lengths.
    """
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if row.prompt_tokens < 1 or row.output_tokens < 1:
                raise ConfigError(f"{path}: row {number} has no lengths; Mooncake's format needs both")
            whole_ms, rest = divmod(row.arrival_ns, 10**6)
            same = row.hash_tokens == MOONCAKE_BLOCK
            record: dict[str, object] = {
                "timestamp": row.arrival_ns / 1e6 if rest else whole_ms,
                "input_length": row.prompt_tokens,
                "output_length": row.output_tokens,
                "hash_ids": list(row.hashes if same else block_hashes(row, MOONCAKE_BLOCK)),
            }
            names = {"client": row.client, "request_id": row.request_id, "service": row.service}
            record |= {name: value for name, value in names.items() if value is not None}
            file.write(json.dumps(record) + "\n")


def _text(value: object) -> str | None:
    return None if value is None else str(value)
