"""GuideLLM: a few requests one after the other, and a few together; none may fail."""

import json

import pytest


@pytest.mark.parametrize("profile", ["kind=synchronous", "kind=concurrent,streams=4"])
def test_no_request_fails(server, model_folder, run_client, tmp_path, profile):
    run_client(
        *("guidellm", "run", "--backend", f"kind=openai_http,target={server.url}", "--profile", profile),
        *("--constraint", "kind=max_requests,count=8"),
        *("--tokenizer", f"kind=huggingface_auto,model={model_folder}"),
        *("--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"),
        *("--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-console"),
    )
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] == 8
    assert totals["errored"] == 0
