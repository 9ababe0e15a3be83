"""How `benchmarks/throughput` and the processes that it compares talk: one JSON object a line.

A runner gets its setup, answers with facts about itself, and then runs jobs until its input ends. It imports
only the standard library here, since it runs in a peer's virtual environment.

The setup: `model` (a folder or file), `threads`, `kv_gib`, and what the largest job needs: `streams`
(prompts), `request_tokens` (of a prompt and its output) and `job_tokens` (of all requests together); some
have more. A job: `prompts` (token ids) and `output` (tokens that each gets: always the likeliest, even one
that ends a text).
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
"""Runs a job; returns how many `tokens` it gave, and whatever else there is to tell."""
Start = Callable[[Mapping[str, Any]], tuple[Generate, Mapping[str, str]]]
"""Loads a model as the setup says; returns what runs jobs, and facts: `version`, and precision of `kv`."""


def serve(start: Start) -> None:
    """Answer what comes on standard input; what libraries print goes to standard error."""
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
