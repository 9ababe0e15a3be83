"""vLLM's own benchmark client, ``vllm bench serve``: random prompts; none may fail."""

import json

import pytest


@pytest.mark.parametrize(
    ("backend", "endpoint"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")]
)
def test_no_request_fails(server, model_folder, run_client, tmp_path, monkeypatch, backend, endpoint):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    run_client(
        *("vllm", "bench", "serve", "--backend", backend, "--base-url", server.url, "--endpoint", endpoint),
        *("--model", server.model, "--tokenizer", str(model_folder)),
        *("--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8"),
        *("--num-prompts", "8", "--max-concurrency", "4"),
        *("--save-result", "--result-dir", str(tmp_path)),
    )
    (report,) = tmp_path.glob("*.json")
    figures = json.loads(report.read_text())
    assert figures["completed"] == 8
    assert figures["failed"] == 0
