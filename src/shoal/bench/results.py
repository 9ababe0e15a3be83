"""Results of a load: the record that reports are made of, and figures as of ``vllm bench serve``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.bench.load import LoadRun
from shoal.bench.target import Answer
from shoal.core import TokenDeadlines
from shoal.measure import InterTokenLatencies, RequestRow, RunRecord, summarise

IntArray = npt.NDArray[np.int64]


def run_record(
    run: LoadRun,
    title: str,
    facts: Mapping[str, str],
    *,
    subject: str = "",
    clients: int | None = None,
    stopped: bool = False,
) -> RunRecord:
    """The record of a run. Times begin with the run; latencies are from when a call was sent.

    title, facts, subject, clients, stopped: as in ``RunRecord``.
    """
    answers = sorted(run.answers, key=lambda answer: answer.end_ns)
    latencies: dict[str, InterTokenLatencies] = {}
    for answer in answers:
        times = np.array(answer.chunks_ns, dtype=np.int64)
        gaps: IntArray = times[1:] - times[:-1]
        latencies.setdefault(answer.call.service, InterTokenLatencies()).add(gaps)
    return RunRecord(
        title=title,
        requests=[answer_row(answer, run.begin_ns) for answer in answers],
        samples=(),
        engines=(),
        inter_token_latencies=latencies,
        facts=facts,
        subject=subject,
        clients=clients,
        stopped=stopped,
    )


def answer_row(answer: Answer, begin_ns: int) -> RequestRow:
    """The record of one answer; times are counted from ``begin_ns``."""
    call, times = answer.call, answer.chunks_ns
    last_ns = times[-1] if times else answer.end_ns
    return RequestRow(
        request_id=call.id,
        service=call.service,
        arrival_ns=answer.sent_ns - begin_ns,
        first_token_ns=(times[0] if times else answer.end_ns) - begin_ns,
        finish_ns=last_ns - begin_ns,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens if times else 0,
        engine=0,
        finish=answer.finish,
        error=answer.error,
        largest_gap_ns=int(np.diff(times).max()) if len(times) > 1 else 0,
        slo=call.slo,
        tokens_on_time=_on_time(answer),
    )


def _on_time(answer: Answer) -> int | None:
    """Tokens on time, where those of a chunk count as one each, and what is left as those of the last one."""
    deadlines = TokenDeadlines.of(answer.call.slo, answer.sent_ns)
    if deadlines is None:
        return None
    if not answer.chunks_ns:
        return 0
    counts = np.diff(np.linspace(0, answer.output_tokens, len(answer.chunks_ns) + 1).round().astype(int))
    first, found = 0, 0
    for count, time_ns in zip(counts.tolist(), answer.chunks_ns, strict=True):
        found += deadlines.num_on_time(first, count, time_ns)
        first += count
    return found


def vllm_figures(run: LoadRun, record: RunRecord, percentiles: Sequence[int] = (99,)) -> dict[str, Any]:
    """The figures of ``vllm bench serve --save-result``, by its names and definitions."""
    done = [answer for answer in run.answers if answer.finish in ("stop", "length")]
    duration_s = max(1e-9, (run.end_ns - run.begin_ns) / 1e9)
    ttfts = [(answer.chunks_ns[0] - answer.sent_ns) / 1e9 for answer in done if answer.chunks_ns]
    totals = [(answer.chunks_ns[-1] - answer.sent_ns) / 1e9 for answer in done if answer.chunks_ns]
    itls = [np.diff(answer.chunks_ns) / 1e9 for answer in done if answer.chunks_ns]
    lengths = [answer.output_tokens for answer in done if answer.chunks_ns]
    tpots = [
        (total - first) / (length - 1)
        for total, first, length in zip(totals, ttfts, lengths, strict=True)
        if length > 1
    ]
    inputs, outputs = (
        sum(answer.prompt_tokens for answer in done),
        sum(answer.output_tokens for answer in done),
    )
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(run.answers) - len(done),
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / duration_s,
        "request_goodput": summarise(record).overall.goodput,
        "output_throughput": outputs / duration_s,
        "total_token_throughput": (inputs + outputs) / duration_s,
        "input_lens": [answer.prompt_tokens for answer in run.answers],
        "output_lens": [answer.output_tokens for answer in run.answers],
        "ttfts": [
            (answer.chunks_ns[0] - answer.sent_ns) / 1e9 if answer.chunks_ns else 0.0
            for answer in run.answers
        ],
        "itls": [(np.diff(answer.chunks_ns) / 1e9).tolist() for answer in run.answers],
        "generated_texts": ["".join(answer.pieces) for answer in run.answers],
        "errors": [answer.error or "" for answer in run.answers],
    }
    gaps = np.concatenate(itls) if itls else np.array([])
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", gaps), ("e2el", totals)):
        found = np.asarray(values, dtype=float) * 1e3
        figures[f"mean_{name}_ms"] = float(found.mean()) if len(found) else 0.0
        figures[f"median_{name}_ms"] = float(np.median(found)) if len(found) else 0.0
        figures[f"std_{name}_ms"] = float(found.std()) if len(found) else 0.0
        for percent in percentiles:
            figures[f"p{percent}_{name}_ms"] = float(np.percentile(found, percent)) if len(found) else 0.0
    return figures
