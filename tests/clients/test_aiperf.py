"""AIPerf: a few streamed requests, four at a time; none may fail."""

import json

import pytest


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_no_request_fails(server, model_folder, run_client, tmp_path, monkeypatch, endpoint):
    # Where that is set it looks for the tokenizer in the hub's cache alone, not in a folder.
    monkeypatch.delenv("HF_HUB_OFFLINE")
    run_client(
        *("aiperf", "profile", "--model", server.model, "--url", server.url, "--endpoint-type", endpoint),
        *("--streaming", "--concurrency", "4", "--request-count", "8", "--isl", "32", "--osl", "8"),
        *("--tokenizer", str(model_folder), "--ui", "none", "--output-artifact-dir", str(tmp_path)),
    )
    (report,) = tmp_path.rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_text())
    assert figures["request_count"]["avg"] == 8
    assert not figures["error_summary"]
