"""``shoal profile`` with a tiny random model on the real engine."""

import importlib.util
import json

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.cli.profile_report import format_seconds
from shoal.config import load_config
from shoal.forecast import load_profile
from shoal.profile.fit import slice_seconds
from shoal.serve.options import ServerOptions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=199,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=400,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    Tokenizer(WordLevel({f"w{i}": i for i in range(199)}, unk_token="w0")).save(
        str(folder / "tokenizer.json")
    )
    return folder


@pytest.fixture(scope="module")
def profiled(model, tmp_path_factory):
    """The command's result, and the folder with what it wrote."""
    folder = tmp_path_factory.mktemp("written")
    arguments = ["profile", "--service", f"chat={model}", "--service", f"complete={model}"]
    arguments += ["--kv-memory", "8MiB", "--prompt-tokens", "100", "--output-tokens", "20"]
    arguments += [
        "--out",
        f"{folder}/out.json",
        "--json",
        f"{folder}/table.json",
        "--plot",
        f"{folder}/p.png",
    ]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result, folder


@pytest.mark.slow
def test_the_profile_predicts_what_the_table_says(profiled):
    result, folder = profiled
    profile = load_profile(folder / "out.json")
    table = json.loads((folder / "table.json").read_text())
    assert (profile.device, profile.threads) == (table["device"], table["threads"])
    assert list(table["services"]) == ["chat", "complete"] == [name for name, _ in profile.models]
    for name, service in table["services"].items():
        step, padded = profile.model(name), profile.padded_form(name)
        curve = profile.times(name)
        assert service["execution_s"] == pytest.approx(curve.execution_time(100, 20))
        assert f"{name} {format_seconds(service['execution_s'])}" in " ".join(result.stdout.split())
        assert service["step_report"]["samples"] >= 15
        assert [(check["sequences"], check["equal"]) for check in service["slices"]] == [
            (4, True),
            (8, True),
            (8, False),
        ]
        for check in service["slices"]:
            batch, prompt, output = (check[k] for k in ("sequences", "prompt_tokens", "output_tokens"))
            assert output == 128
            for form in ("step", "curve", *(("padded",) if check["equal"] else ())):
                assert check[f"{form}_error"] == pytest.approx(check[f"{form}_s"] / check["measured_s"] - 1)
            if not check["equal"]:
                assert check["padded_s"] is check["padded_error"] is None
                continue
            assert check["step_s"] == pytest.approx(step.slice_time(batch, prompt, output))
            assert check["padded_s"] == pytest.approx(padded.serve(float(batch), prompt, output))
            assert check["curve_s"] == pytest.approx(slice_seconds(curve, [prompt] * batch, output))
            assert check["measured_s"] > 0


def test_the_table_fits_a_terminal_and_progress_is_elsewhere(profiled):
    result, _ = profiled
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 80
    assert "profiling chat" in result.stderr
    assert "profiling" not in result.stdout
    for words in ("RMSE", "padded prefill", "padded decode", "measured", "N x l"):
        assert words in result.stdout


def test_the_picture_is_drawn(profiled):
    assert (profiled[1] / "p.png").read_bytes().startswith(b"\x89PNG")


def test_missing_matplotlib_is_reported_before_loading(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run(["profile", str(tmp_path / "no-model"), "--plot", str(tmp_path / "p.png")]) == 2
    assert "pip install 'shoal[plots]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["profile"], "services: name at least one model"),
        (["profile", "m", "--out", "no/where.json"], "cannot write no/where.json: there is no folder no"),
    ],
)
def test_mistakes_are_reported_before_loading(arguments, expected, capsys):
    assert run(arguments) == 2
    assert expected in capsys.readouterr().err


def test_a_context_too_short_for_the_grid_is_reported(model, capsys):
    assert run(["profile", "--service", f"chat={model},max_model_len=100", "--kv-memory", "8MiB"]) == 2
    assert "chat: no batch of the grid fits: a request can have 100 tokens" in capsys.readouterr().err


def test_help_has_examples():
    result = CliRunner().invoke(app, ["profile", "--help"], terminal_width=200)
    assert "Examples:" in result.output
    assert result.output.count("shoal profile") >= 2


@pytest.mark.parametrize(("seconds", "text"), [(0.0123456, "12.3ms"), (0.5, "500ms"), (6.3699, "6.37s")])
def test_durations_are_written_as_the_configuration_reads_them(seconds, text):
    assert format_seconds(seconds) == text


def test_links_prints_budgets_as_configuration(model, tmp_path):
    file = tmp_path / "shoal.yaml"
    file.write_text(
        f"services: [{{name: chat, model: {model}}}]\nkv_cache: {{memory: 8MiB}}\n"
        "cluster: {packing: {epoch: 2s}}\n"
    )
    arguments = ["profile", "--config", str(file), "--links", "--share", "0.25"]
    result = CliRunner().invoke(app, [*arguments, "--json", f"{tmp_path}/links.json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "links.json").read_text())
    assert (told["epoch_s"], told["share"]) == (2, 0.25)
    rates = told["services"]["chat"]
    assert rates["kv_bytes_per_s"] == min(rates["send_bytes_per_s"], rates["take_bytes_per_s"]) > 0
    assert told["budgets"] == {
        "engine_bytes": int(0.5 * rates["kv_bytes_per_s"]),
        "host_bytes": None,
        "prefill_tokens": int(0.5 * rates["prefill_tokens_per_s"]),
    }
    [snippet] = [line for line in result.stdout.splitlines() if line.startswith("cluster:")]
    (tmp_path / "with.yaml").write_text(f"services: [{{name: chat, model: {model}}}]\n{snippet}\n")
    budgets = load_config(ServerOptions, file=tmp_path / "with.yaml").cluster.packing.budgets
    assert budgets.prefill_tokens == told["budgets"]["prefill_tokens"]
    assert budgets.host_bytes is None
    assert 0 <= told["budgets"]["engine_bytes"] - budgets.engine_bytes < 2**20  # rounded down to MiB


def test_links_has_neither_fit_nor_picture(model, tmp_path, capsys):
    assert run(["profile", str(model), "--links", "--out", f"{tmp_path}/out.json"]) == 2
    assert "leave out --out and --plot" in capsys.readouterr().err
