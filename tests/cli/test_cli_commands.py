import errno
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

import shoal
import shoal.models
from shoal.cli.app import app, run
from shoal.cli.models import models as models_app
from shoal.cli.version import describe_cpu
from shoal.core import EngineDied, FinishReason, Service
from shoal.frontend import offline_api
from shoal.frontend.offline_batch import Completion, RequestOutput
from shoal.models import StoredImage
from shoal.schedule import FcfsStrict

runner = CliRunner()
GIVEN = {"max_tokens": 128, "stop": (), "n": 1, "ignore_eos": False}
"""Sampling parameters of generate without flags; all others are the service's."""


def run_cli(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "shoal.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        **options,
    )


class FakeShoal:
    """Stands for the offline engine: repeats each prompt in capitals."""

    made: ClassVar[list] = []

    def __init__(self, services, **options):
        self.services, self.options, self.calls = services, options, []
        FakeShoal.made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, prompts, sampling):
        self.calls.append(("generate", prompts, sampling))
        return [self._output(p, str(p).upper(), s) for p, s in zip(prompts, sampling, strict=True)]

    def chat(self, conversations, sampling):
        self.calls.append(("chat", conversations, sampling))
        return [
            self._output([1], c[0]["content"].upper(), s)
            for c, s in zip(conversations, sampling, strict=True)
        ]

    def _output(self, prompt, text, sampling):
        completions = tuple(
            Completion(
                service=self.services[0].name,
                choice=choice,
                prompt_tokens=3,
                text=text,
                tokens=(1, 2),
                finish_reason=FinishReason.STOP,
            )
            for choice in range(sampling["n"])
        )
        return RequestOutput(prompt=prompt, prompt_token_ids=(1, 2, 3), outputs=completions)


@pytest.fixture
def fake_shoal(monkeypatch):
    monkeypatch.setattr(offline_api, "Shoal", FakeShoal)
    FakeShoal.made = []
    return FakeShoal


def generate(*arguments, **options):
    result = runner.invoke(app, ["generate", *arguments], catch_exceptions=False, **options)
    assert result.exit_code == 0, result.output
    return result


def test_generate_prints_only_the_text_of_a_single_prompt(fake_shoal):
    result = generate(
        "--model", "smollm2", "hello", "--seed", "1", "--kv-memory", "1MiB", "--order", "fcfs-strict"
    )
    assert result.stdout == "HELLO\n"
    [made] = fake_shoal.made
    assert made.services == (Service(name="smollm2", model="smollm2"),)
    assert made.options["kv_cache"].memory_bytes == 2**20
    assert made.options["scheduler"].order == FcfsStrict()
    assert made.calls == [("generate", ["hello"], [GIVEN | {"seed": 1}])]


def test_generate_numbers_many_outputs_and_writes_json(fake_shoal, tmp_path):
    path = tmp_path / "results.json"
    result = generate("-m", "smollm2", "a", "b", "--n", "2", "--json", str(path))
    assert [line[:5] for line in result.stdout.splitlines()[::2]] == ["[1.1]", "[1.2]", "[2.1]", "[2.2]"]
    assert result.stdout.splitlines()[1::2] == ["A", "A", "B", "B"]
    written = json.loads(path.read_text())
    assert [entry["prompt"] for entry in written] == ["a", "b"]
    assert written[1]["outputs"][1] | {"text": "B", "finish_reason": "stop"} == written[1]["outputs"][1]


def test_json_is_the_only_standard_output(fake_shoal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = generate("-m", "smollm2", "a", "--json", "-")
    assert [entry["prompt"] for entry in json.loads(result.stdout)] == ["a"]
    assert result.stderr == "A\n"
    assert list(tmp_path.iterdir()) == []


def test_generate_reads_json_lines_with_their_own_sampling(fake_shoal, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"one"\n\n[1, 2, 3]\n{"prompt": "two", "max_tokens": 3, "stop": "x"}\n')
    generate("-m", "smollm2", "zero", "--file", str(file), "--temperature", "0")
    [(_, prompts, sampling)] = fake_shoal.made[0].calls
    base = GIVEN | {"temperature": 0}
    assert prompts == ["zero", "one", [1, 2, 3], "two"]
    assert sampling == [base, base, base, base | {"max_tokens": 3, "stop": ("x",)}]


def test_generate_reads_lines_from_standard_input(fake_shoal):
    assert generate("-m", "smollm2", "--chat", input="one\n\ntwo\n").stdout.splitlines()[1::2] == [
        "ONE",
        "TWO",
    ]
    [(kind, conversations, _)] = fake_shoal.made[0].calls
    assert kind == "chat"
    assert conversations == [[{"role": "user", "content": text}] for text in ("one", "two")]


@pytest.mark.parametrize(
    ("name", "text"), [("p.txt", "one\ntwo"), ("p.jsonl", '"one"\n"two"'), ("-", "one\ntwo")]
)
def test_a_byte_order_mark_is_removed(name, text, fake_shoal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8-sig")
    generate("-m", "smollm2", "--file", name, input="\ufeff" + text)
    [(_, prompts, _)] = fake_shoal.made[0].calls
    assert prompts == ["one", "two"]


@pytest.mark.parametrize("arguments", [[], ["--file", "-"]])
def test_closed_standard_input_has_no_prompts(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert run(["generate", "-m", "smollm2", *arguments]) == 2
    assert "error: no prompt: give one as an argument" in capsys.readouterr().err


def test_generate_chooses_a_configured_service(fake_shoal, tmp_path):
    file = tmp_path / "shoal.yaml"
    file.write_text("services: [{name: chat, model: smollm2, dtype: float32}, gemma3-270m]")
    generate("--config", str(file), "--model", "chat", "hi")
    assert fake_shoal.made[0].services == (Service(name="chat", model="smollm2", dtype="float32"),)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["generate", "hi"], "no model: name one with --model"),
        (["generate", "-m", "smolm2"], "there is no model 'smolm2'. Did you mean the alias 'smollm2'?"),
        (["generate", "-m", "[/red]"], "there is no model '[/red]'"),
        (["generate", "-m", "smollm2", "hi", "--json", "none/a.json"], "there is no folder none"),
        (["simulate", "--workload", "sharegpt", "--html", "x", "--json", "x"], "two results cannot go to x"),
        (["simulate", "--html", "-", "--json", "-"], "only one result can go to standard"),
        (["generate", "-m", "smollm2", "--file", "none.txt"], "cannot read the prompts in none.txt"),
        (["generate", "-m", "smollm2", "--file", "bad.jsonl"], "bad.jsonl, line 2: not valid JSON"),
        (["generate", "-m", "smollm2", "--file", "empty.jsonl"], "no prompt: give one as an argument"),
        (["generate", "-m", "smollm2", "--file", "key.jsonl"], "key.jsonl, line 1: max_tokns: unknown key"),
        (["generate", "-m", "smollm2", "--file", "type.jsonl"], "type.jsonl, line 1: expected a text"),
        (["generate", "-m", "smollm2", "--file", "ids.jsonl", "--chat"], "--chat needs prompts as text"),
        (["generate", "-m", "smollm2", "hi", "--temperature", "-1"], "temperature must be in [0.0, 100.0]"),
        (
            ["generate", "-m", "smollm2", "hi", "--kv-memory", "x"],
            "--kv-memory: kv_cache.memory: expected a size",
        ),
        (["generate", "--service", "a=b", "--service", "c=d", "hi"], "choose one with --model: a, c"),
        (["serve"], "services: name at least one model"),
        (["serve", "smollm2", "smollm2"], "there is already a service named 'smollm2'"),
        (["serve", "--config", "none.yaml"], "cannot read the configuration file none.yaml"),
        (
            ["serve", "smollm2", "--device", "cpu0"],
            "devices[0]: expected cpu, cuda:0 or simulated, got 'cpu0'",
        ),
        (["chat"], "no model: name one with MODEL or --url"),
        (["chat", "--url", "http://x", "--kv-memory", "1MiB"], "--url connects to a running server"),
    ],
)
def test_mistakes_are_one_red_line_and_exit_code_2(arguments, expected, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115
    Path("bad.jsonl").write_text('"fine"\n{\n')
    Path("empty.jsonl").write_text("\n")
    Path("key.jsonl").write_text('{"prompt": "a", "max_tokns": 3}\n')
    Path("type.jsonl").write_text("17\n")
    Path("ids.jsonl").write_text("[1, 2]\n")
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("error: ")


def test_an_option_given_twice_is_refused(capsys):
    assert run(["simulate", "--model", "llama-3.1-8b", "--model", "llama-2-7b"]) == 2
    assert "'--model': given 2 times" in capsys.readouterr().err
    assert runner.invoke(app, ["generate", "--stop", "a", "--stop", "b", "--help"]).exit_code == 0


def test_a_failure_while_running_is_exit_code_1(capsys):
    def fail(**_):
        raise EngineDied("the engine process ended")

    assert run(["serve", "x"], fail) == 1
    assert capsys.readouterr().err == "error: the engine process ended\n"


def test_too_few_open_files_are_reported_without_a_traceback(capsys):
    def fail(**_):
        raise OSError(errno.EMFILE, "Too many open files")

    assert run(["generate"], fail) == 1
    assert capsys.readouterr().err == "error: Too many open files: allow more, as with `ulimit -n 1024`\n"


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["generate"], ["chat"], ["models"], ["models", "pull"], ["demo"]]
)
def test_help_exists_everywhere(command):
    result = runner.invoke(app, [*command, "--help"], terminal_width=200)
    assert result.exit_code == 0
    assert "shoal" in result.output


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "demo"])
def test_help_has_examples(command):
    result = runner.invoke(app, [command, "--help"], terminal_width=200)
    assert "Examples:" in result.output
    assert result.output.count(f"shoal {command}") >= 2


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version(arguments):
    assert runner.invoke(app, arguments).output == f"shoal {shoal.__version__}\n"


def test_verbose_version_has_kernels_and_cpu(monkeypatch):
    monkeypatch.setenv("SHOAL_NATIVE", "off")
    lines = runner.invoke(app, ["version", "--verbose"]).output.splitlines()
    assert lines[:2] == [f"shoal {shoal.__version__}", "compute  torch only: SHOAL_NATIVE=off"]
    assert [line.split()[0] for line in lines[2:]] == ["torch", "Python", "CPU"]
    assert describe_cpu() in lines[-1]


def test_a_cpu_is_described_by_name_and_features(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    assert describe_cpu(cpuinfo) == platform.machine()
    cpu = "model name\t: Fast CPU @ 3 GHz\nflags\t\t: fpu avx512f avx2 avx512_vnni sse2\n\n"
    cpuinfo.write_text(cpu + cpu)
    assert describe_cpu(cpuinfo) == "Fast CPU @ 3 GHz (avx2 avx512f avx512_vnni)"


@pytest.mark.parametrize(
    ("arguments", "new_name"),
    [
        (["serve", "smollm2", "--eviction", "swap"], "--preemption-mode"),
        (["generate", "hi", "--eviction=swap"], "--preemption-mode"),
        (["simulate", "--preempt"], "--preempt-for-waiting less-urgent"),
        (["serve", "--no-preempt"], "--preempt-for-waiting never"),
    ],
)
def test_a_renamed_flag_is_rejected_with_the_new_name(arguments, new_name):
    result = runner.invoke(app, arguments, terminal_width=200)
    assert result.exit_code == 2
    assert f"is now called {new_name}" in result.output


def test_an_unknown_command_is_exit_code_2():
    result = run_cli("serv")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["serve", "--help"],
        ["serve", "--port", "none", "smollm2"],
        ["version", "--verbose"],
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(arguments):
    program = (
        "import sys\n"
        "from shoal.cli.app import run\n"
        f"run({arguments!r})\n"
        "heavy = {'torch', 'transformers', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_ctrl_c_is_exit_code_130_without_a_traceback(tmp_path):
    program = (
        "import sys, time\n"
        "import shoal.cli.prompts as prompts\n"
        "import shoal.cli.generate as generate\n"
        "def wait(*_):\n"
        "    print('waiting', flush=True)\n"
        "    time.sleep(600)\n"
        "generate.collect_prompts = wait\n"
        "from shoal.cli import main\n"
        "main(['generate', '-m', 'smollm2', 'x'])\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("version", "shoal.cli.app"),
        ("serve", "shoal.cli.app"),
        ("serve", "shoal.cluster.backends.node_start"),
    ],
)
def test_ctrl_c_while_importing_is_exit_code_130_without_a_traceback(command, module):
    program = (
        "import sys\n"
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        f"        if name == {module!r}:\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted())\n"
        "from shoal.cli import main\n"
        f"main([{command!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 130
    assert result.stderr == ""


def test_sigterm_lets_a_command_clean_up():
    program = (
        "import os, signal, sys, tempfile, time\n"
        "import shoal.cli.prompts as prompts\n"
        "import shoal.cli.generate as generate\n"
        "def terminated(*_):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(600)\n"
        "    finally:\n"
        "        print('cleared up')\n"
        "generate.collect_prompts = terminated\n"
        "from shoal.cli import main\n"
        "main(['generate', '-m', 'smollm2', 'x'])\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (143, "cleared up\n", "")


@dataclass(frozen=True)
class FakeModel:
    name: str
    cached: bool
    size_bytes: int
    licence: str = "Apache-2.0"
    description: str = "a model"
    chat: bool = True
    path: Path | None = None


def test_models_list(monkeypatch):
    known = [FakeModel("smollm2", True, 270_000_000), FakeModel("gemma3-270m", False, 0, chat=False)]
    monkeypatch.setattr(shoal.models, "list_models", lambda: known)
    monkeypatch.setattr(shoal.models, "list_images", lambda: [])
    output = runner.invoke(models_app, ["list"], catch_exceptions=False).output
    rows = {line.split("│")[1].strip(): line for line in output.splitlines() if "│" in line}
    assert "270 MB" in rows["smollm2"]
    assert rows["gemma3-270m"].count("no") == 2
    assert "cache: " in output
    assert "weight image" not in output


def test_models_list_shows_weight_images(monkeypatch, tmp_path):
    stored = [
        StoredImage(tmp_path / "a-int8-12", tmp_path, 150_400_000),
        StoredImage(tmp_path / "b-int8-34", tmp_path / "[b]", 20_000_000),
        StoredImage(tmp_path / "c-int8-56", None, 1_000_000),
    ]
    monkeypatch.setattr(shoal.models, "list_models", lambda: [])
    monkeypatch.setattr(shoal.models, "list_images", lambda: stored)
    output = runner.invoke(models_app, ["list"], env={"COLUMNS": "400"}, catch_exceptions=False).output
    rows = {
        cells[1]: cells[2:4]
        for line in output.splitlines()
        if len(cells := [cell.strip() for cell in line.split("│")]) == 5
    }
    assert rows == {
        "a-int8-12": ["150 MB", str(tmp_path)],
        "b-int8-34": ["20 MB", f"{tmp_path / '[b]'} (gone)"],
        "c-int8-56": ["1 MB", "unknown"],
    }


def test_models_pull_prints_each_task_once_and_the_folder(monkeypatch, tmp_path):
    def pull(name, progress):
        for done in range(3):
            progress(f"downloading {name}", done, 3)
        progress(f"converting {name}", 0, None)
        return tmp_path

    monkeypatch.setattr(shoal.models, "pull_model", pull)
    result = runner.invoke(models_app, ["pull", "smollm2"], catch_exceptions=False)
    assert result.stdout == f"smollm2 is at {tmp_path}\n"
    assert result.stderr.splitlines() == ["downloading smollm2", "converting smollm2"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["generate", "--model", "a" * 300, "hi"], "there is no model"),
        (["generate", "--model", "smollm2", "--threads", "99999999999999", "hi"], "threads must be 1 to"),
        (["chat", "--url", "http://256.256.256.256"], "--url"),
        (["chat", "--url", "http://127.0.0.1:99999"], "port must be 0-65535"),
    ],
)
def test_invalid_values_are_one_line(arguments, says, capsys):
    assert run(arguments) != 0
    told = capsys.readouterr().err
    assert says in told
    assert "Traceback" not in told


def test_deeply_nested_prompts_are_reported_with_their_line(tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("[" * 100_000)
    assert run(["generate", "--model", "smollm2", "--file", str(file)]) != 0
    assert "not valid JSON" in capsys.readouterr().err


def test_a_simulated_model_with_wrong_types_is_rejected(tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hidden_size": "x", "num_attention_heads": 2, "num_hidden_layers": 1}))
    assert run(["simulate", "--model", str(file)]) != 0
    assert "describes no model" in capsys.readouterr().err
