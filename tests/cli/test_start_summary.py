import io
import json
import shlex
import subprocess
from dataclasses import replace

import pytest
from rich.console import Console

from shoal.cli.start_summary import (
    curl_example,
    print_access,
    print_addresses,
    print_batching,
    print_engines,
)
from shoal.cluster.batching_options import BatchingOptions
from shoal.cluster.status import EngineState, EngineStatus, ServiceStatus
from shoal.engine import EngineInfo, ServiceInfo
from shoal.models import describe_random_model
from shoal.serve import ServerOptions
from shoal.serve.http.exposure import exposure

CHAT = ServiceInfo(
    model="x[/red]/tiny",
    context_tokens=8192,
    max_total_tokens=2048,
    kv_tokens=6144,
    vocab_size=9,
    dtype="int8",
    weight_bytes=135 << 20,
)


def engine(name, **services):
    info = EngineInfo(
        services=services,
        device="cpu",
        threads=3,
        block_size=16,
        merged_blocks=96,
        kv_bytes=24 << 20,
        weight_bytes=1,
        kernels="native kernels (avx2, built by cc 12.2.0)",
        max_running=128,
    )
    return EngineStatus(name=name, state=EngineState.READY, services=tuple(services), device="cpu", info=info)


def printed(show, *arguments, width=80, **options):
    console = Console(width=width, file=io.StringIO())
    show(*arguments, console, **options)
    return console.file.getvalue()


def summary(*engines, services=None):
    """What is printed of engines, as one line: where lines are broken is the business of one test."""
    names = services or [name for status in engines for name in status.services]
    known = {name: ServiceStatus(ready=1, wanted=1, waiting=0) for name in names}
    return " ".join(printed(print_engines, known, engines).split())


@pytest.mark.parametrize(
    ("batching", "expected"),
    [
        (BatchingOptions(), "formed as fixed, for each idle engine"),
        (
            BatchingOptions(former="scls", interval_s=3, load_factor=0.5, slice_tokens=128),
            "formed as scls, every 3 s, later under load, in slices of 128 tokens",
        ),
        (
            BatchingOptions(former="slo-odbs", max_batch=16, trust_predictions=True, lengths="learned"),
            "formed as slo-odbs, for each idle engine, of at most 16 requests, as long as the longest output "
            "that is predicted (learned)",
        ),
    ],
)
def test_the_summary_shows_how_batches_are_formed(batching, expected):
    assert " ".join(printed(print_batching, batching).split()) == f"batches {expected}"


def test_the_summary_shows_random_weights(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8, "vocab_size": 9,'
        ' "max_position_embeddings": 64}'
    )
    described = describe_random_model("m", tmp_path, "int8", parameters=9, weights="random 0")
    text = summary(engine("0", chat=replace(CHAT, described=described), base=CHAT))
    assert "computed in int8, 135 MiB of random weights, 2,048 tokens" in text
    assert "computed in int8, 135 MiB of weights, 2,048 tokens" in text


def test_the_summary_shows_dtype_and_limits():
    text = summary(engine("0", chat=CHAT))
    assert (
        "chat x[/red]/tiny, computed in int8, 135 MiB of weights, 2,048 tokens a request, KV for 6,144"
        in text
    )
    assert "compute native kernels (avx2, built by cc 12.2.0)" in text
    assert "KV pool 24.0 MiB, shared by all services; at most 128 requests run at once" in text
    assert "engine" not in text


def test_simulated_engines_are_said_to_be_so():
    made_up = replace(CHAT, simulated=True)
    engines = [
        replace(
            one,
            info=replace(one.info, device="simulated (h100)", threads=1, kernels="simulated: like an h100"),
        )
        for one in (engine("0", chat=made_up), engine("b", chat=made_up))
    ]
    text = summary(*engines)
    assert "x[/red]/tiny, in int8, 135 MiB of weights" in text
    assert "compute simulated: like an h100" in text
    assert "engine b simulated (h100), KV pool 24.0 MiB: chat" in text


def test_a_limit_on_the_memory_for_weights_is_shown():
    limited = replace(engine("0", chat=CHAT), weights_memory_bytes=300 << 20)
    assert "weights up to 300.0 MiB of an engine's are in memory; others come when" in summary(limited)
    assert "up to" not in summary(engine("0", chat=CHAT))


def test_facts_missing_from_older_engines_are_left_out():
    text = summary(engine("0", chat=replace(CHAT, dtype="", weight_bytes=0)))
    assert "chat x[/red]/tiny, 2,048 tokens a request, KV for 6,144 tokens" in text


def test_of_several_engines_the_summary_has_a_line_each():
    smaller = replace(CHAT, max_total_tokens=512, kv_tokens=600, dtype="bfloat16", weight_bytes=270 << 20)
    text = summary(engine("0", chat=CHAT), engine("b", chat=smaller, base=CHAT))
    assert "engine 0 cpu, 3 threads, KV pool 24.0 MiB: chat; at most" in text
    assert "engine b cpu, 3 threads, KV pool 24.0 MiB: chat, base; at most" in text
    assert text.count("compute ") == 1
    assert "computed in int8 and bfloat16, 135 or 270 MiB of weights, 2,048 tokens a request" in text
    assert "KV for 6,144 + 600 tokens" in text


def test_an_unloaded_service_is_shown():
    text = summary(engine("0", chat=CHAT), services=["idle", "chat"])
    assert "idle in the memory of no engine; a request loads it chat x[/red]/tiny" in text


def test_the_summary_fits_eighty_columns_and_cuts_no_path():
    path = "/data/models/" + "long-" * 20 + "Q4_K_M.gguf"
    services = {"smollm2-chat-of-everybody": CHAT, "b": replace(CHAT, model=path)}
    known = {name: ServiceStatus(ready=1, wanted=1, waiting=0) for name in services}
    text = printed(print_access, exposure(ServerOptions(host="0.0.0.0"), "0.0.0.0"))
    text += printed(print_engines, known, [engine("0", **services), engine("1", **services)])
    text += printed(
        print_addresses, "http://127.0.0.1:8000", "gemma3-270m", chats={"gemma3-270m"}, keyed=True
    )
    assert path in text
    assert [line for line in text.splitlines() if len(line) > 80 and path not in line] == []


@pytest.mark.parametrize(
    ("listens", "reached"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("http://[::]:8000", "http://[::1]:8000"),
    ],
)
def test_addresses_can_be_pasted(listens, reached):
    text = printed(print_addresses, listens, "m")
    assert f"ready    {reached} " in text
    assert f"OpenAI   {reached}/v1 " in text
    assert f"docs     {reached}/docs\n" in text
    command = text.partition("try\n")[2]
    assert shlex.split(command)[:2] == ["curl", f"{reached}/v1/completions"]


@pytest.mark.parametrize(
    ("chat", "path", "field"), [(True, "chat/completions", "messages"), (False, "completions", "prompt")]
)
@pytest.mark.parametrize("name", ["chat", 'it\'s $HOME "x"', "größe"])
@pytest.mark.parametrize("keyed", [False, True])
def test_the_example_is_a_request_in_any_shell(chat, path, field, name, keyed):
    command = curl_example("http://[::1]:80", name, chat=chat, keyed=keyed)
    listed = f'curl() {{ for word in "$@"; do printf "%s\\0" "$word"; done; }}\n{command}\n'
    said = subprocess.run(["sh", "-f"], input=listed.encode(), stdout=subprocess.PIPE, check=True).stdout
    words = said.decode().split("\0")
    assert words[0] == f"http://[::1]:80/v1/{path}"
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == name
    assert body[field]
    assert ("Authorization: Bearer API_KEY" in words) == keyed


def test_the_example_of_a_chat_model_is_a_chat():
    assert "/v1/chat/completions" in printed(print_addresses, "http://h:1", "a", chats=["a", "b"])
    assert "/v1/completions" in printed(print_addresses, "http://h:1", "c", chats=["a", "b"])
