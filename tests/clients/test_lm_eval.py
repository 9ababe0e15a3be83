"""lm-evaluation-harness: the same scores over HTTP as with ``transformers``, both in float32.

The items are made up here, 50 for each task: the scores need not be good, they must be equal.
"""

import json
import random
from pathlib import Path

import lm_eval
import pytest
import torch

from conftest import shoal_serving

N_ITEMS = 50
LOGPROB_TOLERANCE = 1e-3
"""Of a continuation's log-likelihood; two implementations add in different orders."""


def write_items(path: Path, items: list[dict]) -> dict:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }


def choices_task(folder: Path) -> dict:
    """Which of two numbers is larger: a task of log-likelihoods."""
    draw = random.Random(15)
    items = []
    for _ in range(N_ITEMS):
        numbers = draw.sample(range(1000), 2)
        items.append(
            {
                "question": f"Of the numbers {numbers[0]} and {numbers[1]}, the larger is",
                "choices": [str(number) for number in numbers],
                "answer": numbers.index(max(numbers)),
            }
        )
    return write_items(folder / "choices.jsonl", items) | {
        "task": "shoal_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def sums_task(folder: Path) -> dict:
    """Sums, after two that are done: a task of generated text."""
    draw = random.Random(16)
    items = [{"a": draw.randrange(20), "b": draw.randrange(20)} for _ in range(N_ITEMS)]
    return write_items(folder / "sums.jsonl", items) | {
        "task": "shoal_sums",
        "output_type": "generate_until",
        "doc_to_text": "2 + 3 = 5\n10 + 7 = 17\n{{a}} + {{b}} =",
        "doc_to_target": " {{a + b}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0.0, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "ignore_punctuation": True}],
    }


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("items")
    return {"choices": choices_task(folder), "sums": sums_task(folder)}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("float32") / "log.txt"
    with shoal_serving(log, "--service", "smollm2=smollm2,dtype=float32") as server:
        yield server


def evaluate(model: str, model_args: dict, task: dict, **options) -> tuple[dict, list]:
    """Scores, and what the model answered to each item in turn."""
    outcome = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        batch_size=16 if model == "hf" else 1,
        tasks=[dict(task)],
        bootstrap_iters=0,
        confirm_run_unsafe_code=True,
        **options,
    )
    name = task["task"]
    samples = sorted(outcome["samples"][name], key=lambda sample: sample["doc_id"])
    scores = {key: value for key, value in outcome["results"][name].items() if "stderr" not in key}
    return scores, [sample["resps"] for sample in samples]


@pytest.fixture
def reference(model_folder):
    torch.set_num_threads(1)  # several threads wait for each other while the server computes
    return {"pretrained": str(model_folder), "dtype": "float32", "device": "cpu"}


@pytest.fixture
def over_http(server, model_folder):
    return {
        "model": server.model,
        "base_url": f"{server.v1}/completions",
        "tokenizer": str(model_folder),
        "tokenizer_backend": "huggingface",
        "num_concurrent": 4,
    }


def test_log_likelihoods(tasks, reference, over_http, record_property):
    expected, reference_resps = evaluate("hf", reference, tasks["choices"])
    scores, resps = evaluate("local-completions", over_http, tasks["choices"])
    assert scores == expected
    pairs = [
        (float(got[0][0]), float(want[0][0]))
        for sample, reference_sample in zip(resps, reference_resps, strict=True)
        for got, want in zip(sample, reference_sample, strict=True)
    ]
    assert len(pairs) == 2 * N_ITEMS
    largest = max(abs(got - want) for got, want in pairs)
    record_property("largest_difference_of_log_likelihoods", largest)
    print(f"{scores}; the largest difference of log-likelihoods is {largest:.2g}")
    assert largest < LOGPROB_TOLERANCE


def test_generated_text(tasks, reference, over_http):
    expected = evaluate("hf", reference, tasks["sums"])
    assert evaluate("local-completions", over_http, tasks["sums"]) == expected
    print(expected[0])


def test_generated_chats(tasks, server, reference):
    expected = evaluate("hf", reference, tasks["sums"], apply_chat_template=True)
    chats = {"model": server.model, "base_url": f"{server.v1}/chat/completions", "num_concurrent": 4}
    assert evaluate("local-chat-completions", chats, tasks["sums"], apply_chat_template=True) == expected
    print(expected[0])
