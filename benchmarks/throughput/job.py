"""Protocol between `benchmarks.throughput` and its engine processes: one JSON object per line.

A process gets its setup, answers with facts about itself, and runs jobs until its input ends. This module
imports only the standard library, since it runs in a peer's virtual environment.

Setup: `model` (folder or file), `threads`, `kv_gib`, and the largest job's `streams` (prompts),
`request_tokens` (prompt and output) and `job_tokens` (all requests); some engines have more. Job: `prompts`
(token ids) and `output` (tokens of each answer; greedy, without end tokens).
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Prompts = Sequence[Sequence[int]]
Generate = Callable[[Prompts, int], Mapping[str, Any]]
"""Runs a job; returns the number of output `tokens`, and optional further figures."""
Start = Callable[[Mapping[str, Any]], tuple[Generate, Mapping[str, str]]]
"""Loads a model by the setup; returns what runs jobs, and facts: `version`, and precision of `kv`."""


def serve(start: Start) -> None:
    """Answer messages on standard input; output of libraries goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for answer in _answers(start):
        print(json.dumps(answer), file=answers, flush=True)


def _answers(start: Start) -> Iterator[Mapping[str, Any]]:
    try:
        generate, facts = start(json.loads(sys.stdin.readline()))
    except Exception as error:
        yield _failure(error)
        return
    yield facts
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        try:
            done = generate(job["prompts"], job["output"])
        except Exception as error:
            yield _failure(error)
        else:
            yield {"seconds": time.perf_counter() - started, **done}


def _failure(error: Exception) -> Mapping[str, str]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}
