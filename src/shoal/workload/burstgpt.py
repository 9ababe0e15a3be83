"""Trace format: BurstGPT's traces of ChatGPT and GPT-4 (Wang et al., 2024), CSV."""

from collections.abc import Iterator
from pathlib import Path

from shoal.workload.lines import ReadOptions, csv_columns, parse_int, parse_ns
from shoal.workload.rows import TraceRow

COLUMNS = ("timestamp", "request tokens", "response tokens")


def read_burstgpt(path: Path, options: ReadOptions) -> Iterator[TraceRow | None]:
    """Requests with times in seconds; those without response tokens failed and are skipped.

    The client is the model and log type ("ChatGPT Conversation log"), which have separate traffic.
    """
    for line, (time, prompt, output, *source) in csv_columns(path, COLUMNS, ("model", "log type")):
        arrival = parse_ns(time, "Timestamp", path, line)
        output_tokens = parse_int(output, "Response tokens", path, line, least=0)
        prompt_tokens = parse_int(prompt, "Request tokens", path, line, least=1 if output_tokens else 0)
        client = " ".join(filter(None, source))
        yield TraceRow(arrival, prompt_tokens, output_tokens, client or None) if output_tokens else None
