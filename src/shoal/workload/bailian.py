"""Trace format: Qwen on Alibaba Cloud's Bailian, JSON lines with times in seconds and hashes of 16 tokens.

Every line has the whole prompt of its turn. ``chat_id`` distinguishes it from Mooncake's format.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.workload.hashed_lines import CHAT, PARENT, HashedLines
from shoal.workload.lines import ReadOptions
from shoal.workload.rows import TraceRow

_LIKE = (
    '{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 40, "output_length": 132, '
    '"type": "text", "turn": 2, "hash_ids": [1089, 1090, 7182]}'
)
_LINES = HashedLines(ns_per_unit=10**9, hash_tokens=16, like=_LIKE, has_chats=True, least_output=0)
_NO_PARENT = ("None", "-1")


def read_bailian(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with the chat as id; those without an output are skipped.

    The client is the first chat of the conversation in the trace.
    """
    first_chats: dict[str, str] = {}
    for record, row in _LINES.read(path):
        chat, parent = str(record[CHAT]), str(record.get(PARENT))
        first = chat if parent in _NO_PARENT else first_chats.get(parent, parent)
        first_chats[chat] = first
        yield replace(row, client=first, request_id=chat) if row.output_tokens else None
