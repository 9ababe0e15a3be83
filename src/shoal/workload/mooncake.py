"""Mooncake's traces (Qin et al., FAST 2025): JSON lines whose hashes tell which prefixes are shared.

Also the format in which workloads are exported, as it keeps everything that a request is made of.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal.core import ConfigError
from shoal.workload.lines import ReadOptions, get_member, json_lines, line_error, parse_float, parse_int
from shoal.workload.prefixes import block_hashes
from shoal.workload.rows import LARGEST_S, MOONCAKE_BLOCK, TraceRow

_LIKE = '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}'


def read_mooncake(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with times in milliseconds; ``hash_ids``, our ``client`` and ``request_id`` may be missing."""
    for line, record in json_lines(path, _LIKE):
        prompt = parse_int(get_member(record, "input_length", path, line, _LIKE), "input_length", path, line)
        output = parse_int(
            get_member(record, "output_length", path, line, _LIKE), "output_length", path, line
        )
        client, request_id = record.get("client"), record.get("request_id")
        yield TraceRow(
            _arrival(get_member(record, "timestamp", path, line, _LIKE), path, line),
            prompt,
            output,
            None if client is None else str(client),
            _hashes(record.get("hash_ids", []), prompt, path, line),
            request_id=None if request_id is None else str(request_id),
        )


def write_mooncake(path: Path, rows: Iterable[TraceRow]) -> None:
    """Write rows so that ``read_trace`` gives them back, one line each.

    Times are milliseconds, with a fraction only where they are not whole. Hashes of blocks other than 512
    tokens become hashes of the full blocks of 512, which share what the rows shared in units of 512.
    Raises ConfigError for rows without lengths.
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
            if row.client is not None:
                record["client"] = row.client
            if row.request_id is not None:
                record["request_id"] = row.request_id
            file.write(json.dumps(record) + "\n")


def _arrival(value: object, path: Path, line: int) -> int:
    milliseconds = parse_float(value, "timestamp", path, line, 0.0, 1e3 * LARGEST_S)
    return value * 10**6 if isinstance(value, int) else round(milliseconds * 1e6)


def _hashes(value: object, prompt: int, path: Path, line: int) -> tuple[int, ...]:
    most = -(-prompt // MOONCAKE_BLOCK)
    expected = f"a list of whole numbers, at most {most} for {prompt} tokens in blocks of {MOONCAKE_BLOCK}"
    if not isinstance(value, list):
        raise line_error(path, line, f"hash_ids is {str(value)[:80]!r}", expected)
    if any(type(number) is not int for number in value):
        raise line_error(path, line, "hash_ids has something else than numbers", expected)
    if len(value) > most:
        raise line_error(path, line, f"{len(value)} hash_ids", expected)
    return tuple(value)
