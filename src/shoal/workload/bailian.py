"""Traces of Qwen on Alibaba Cloud's Bailian: like Mooncake's, but in seconds, with hashes of 16 tokens.

Every line has the whole prompt of its turn. Its ``chat_id`` tells it from Mooncake's.
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
    """Requests by the names of their chats; those without an answer are skipped.

    The client is the chat with which the conversation began, as far as the trace goes back.
    """
    begins: dict[str, str] = {}
    for record, row in _LINES.read(path):
        chat, parent = str(record[CHAT]), str(record.get(PARENT))
        begin = chat if parent in _NO_PARENT else begins.get(parent, parent)
        begins[chat] = begin
        yield replace(row, client=begin, request_id=chat) if row.output_tokens else None
