"""Flags of other servers: aliases with the same meaning, and hints for others."""

import re

import pytest
import typer

from shoal.cli.app import app, run
from shoal.config import CLUSTER_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS
from shoal.config.foreign_flags import ALIASES, HINTS, OWN_ALIASES, POSITIONAL, VALUES, VARIABLES, hint

OURS = {
    f"--{'no-' if no else ''}{flag.name}": flag
    for flag in (*MODEL_FLAGS, *ENGINE_FLAGS, *CLUSTER_FLAGS, *SERVER_FLAGS)
    for no in ((False, True) if flag.switch else (False,))
}
COMMANDS = typer.main.get_command(app).commands
SERVE = COMMANDS["serve"]
VALUE = {
    "kv-memory": "1GiB", "order": "priority", "admin-key": "sk-a", "dtype": "float32", "max-model-len": "512",
    "chat-template": "{{ x }}", "weights": "random",
}  # fmt: skip


@pytest.fixture
def served(monkeypatch):
    """Arguments of the servers that were run: plans of engines, and the server's options."""
    for name in (*VARIABLES, "SHOAL_API_KEY", "SHOAL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    calls = []
    monkeypatch.setattr(
        "shoal.serve.launch.run_server", lambda plans, server, *_, **__: calls.append((plans, server))
    )
    return calls


def parsed(*arguments):
    """What `shoal serve smollm2` with these arguments is given."""
    return SERVE.make_context("serve", ["smollm2", *arguments]).params


def told(capsys):
    """What went to standard error, without frames and lines."""
    return " ".join(capsys.readouterr().err.replace("│", " ").split())


def value_of(ours):
    flag = OURS[ours]
    return [] if flag.switch else [VALUE.get(flag.name, "7")]


@pytest.mark.parametrize("other", ALIASES)
def test_an_alias_is_equal_to_the_flag(other, monkeypatch):
    for name in ("SHOAL_API_KEY", "SHOAL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    ours = ALIASES[other]
    value = ["gemma3-270m"] if ours == POSITIONAL else value_of(ours)
    expected = parsed(*([ours] if ours else []), *value)
    assert expected != parsed()
    assert parsed(other, *value) == expected
    if other.startswith("--"):
        assert parsed(f"--{other[2:].replace('-', '_')}", *value) == expected
        assert not value or parsed(f"{other}={value[0]}") == expected


@pytest.mark.parametrize("other", HINTS)
def test_hints_name_existing_flags(other):
    with pytest.raises(typer.BadParameter) as error:
        parsed(other, "1")
    hint = HINTS[other]
    assert error.value.message == f"{other} is not a flag of Shoal: {hint}"
    assert hint.startswith(("write ", "leave it out", "set ", "put ", "let "))
    for word in hint.replace(",", " ").replace(";", " ").split():
        assert not word.startswith("--") or word in OURS or word == "--service", word


def test_aliases_hide_no_flag_and_lead_to_flags():
    assert not set(OURS) & (set(ALIASES) | set(HINTS))
    assert not set(ALIASES) & set(HINTS)
    assert set(ALIASES.values()) - {POSITIONAL} <= set(OURS)
    assert set(VALUES) <= set(OURS)
    for parameter in SERVE.params:
        assert not set(parameter.opts) & (set(ALIASES) | set(HINTS))


@pytest.mark.parametrize("flag", ["--gpu_memory_utilization", "--gpu-memory-utilization=0.9", "-tp", "-tp=2"])
def test_hints_come_in_every_spelling(flag, capsys):
    assert run(["serve", "smollm2", flag]) == 2
    assert "is not a flag of Shoal" in told(capsys)


def test_a_command_of_vllm(served, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    arguments = ["smollm2", "--served-model-name", "chat", "--max-model-len", "512", "--dtype", "half"]
    arguments += ["--chat-template", str(template), "--max_num_batched_tokens=256", "--api-key", "sk-a"]
    assert run(["serve", *arguments, "--host", "0.0.0.0", "--port", "9000", "--block-size", "32"]) == 0
    [(plans, server)] = served
    [service] = plans[0].options.services
    assert (service.name, service.model, service.dtype) == ("chat", "smollm2", "float16")
    assert (service.max_model_len, service.chat_template) == (512, "{{ messages }}")
    assert (plans[0].options.scheduler.max_batched_tokens, plans[0].options.kv_cache.block_size) == (256, 32)
    assert (server.host, server.port, server.api_keys[0].key) == ("0.0.0.0", 9000, "sk-a")


@pytest.mark.parametrize(
    ("format", "weights"), [("dummy", "random"), ("auto", "files"), ("safetensors", "files")]
)
def test_a_load_format_is_weights(served, format, weights):
    assert run(["serve", "smollm2", "--load-format", format]) == 0
    assert served[0][0][0].options.services[0].weights == weights


def test_flags_of_models_are_of_each_model_that_is_an_argument(served):
    command = ["serve", "smollm2", "gemma3-270m", "--service", "x=smollm2", "--max-model-len", "64"]
    assert run(command) == 0
    services = served[0][0][0].options.services
    assert [(s.name, s.max_model_len) for s in services] == [
        ("smollm2", 64),
        ("gemma3-270m", 64),
        ("x", None),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["smollm2", "--served-model-name", "a", "b"],
            "--served-model-name: needs one MODEL on the command line; here",
        ),
        (
            ["smollm2", "--served-model-name", "a", "b"],
            "write --service NAME=MODEL, or services[].name in the file",
        ),
        (
            ["--service", "a=smollm2", "--dtype", "auto"],
            "--dtype: is of each MODEL of the command line; here write",
        ),
        (
            ["--service", "a=smollm2", "--dtype", "auto"],
            "write --service NAME=MODEL,dtype=VALUE, or services[].dtype",
        ),
        (["smollm2", "--dtype", "int4"], "--dtype: services[0].dtype: expected one of auto"),
        (
            ["smollm2", "--load-format", "gguf"],
            "--weights: services[0].weights: expected one of files, random",
        ),
        (
            ["smollm2", "--max-model-len", "32k"],
            "--max-model-len: services[0].max_model_len: expected a whole",
        ),
        (["smollm2", "--max-batched-tokens", "1", "--max-num-batched-tokens", "2"], "given 2 times"),
    ],
)
def test_mistakes(served, arguments, message, capsys):
    assert run(["serve", *arguments]) == 2
    assert message in told(capsys)


def test_values_and_arguments_after_two_dashes_are_not_flags(served, capsys):
    assert run(["serve", "smollm2", "--api-key", "--max-num-seqs"]) == 0
    assert served[0][1].api_keys[0].key == "--max-num-seqs"
    assert run(["serve", "--", "smollm2", "--max-num-seqs"]) in (0, 2)
    assert "is not a flag of Shoal" not in capsys.readouterr().err


def flags_of(command):
    return {flag for parameter in COMMANDS[command].params for flag in parameter.opts}


def tried(command, *arguments):
    """The options that a command reads from these arguments, or the error."""
    needed = ["--devices", "devices.yaml"] if command in ("plan", "place") else []
    try:
        return COMMANDS[command].make_context(command, [*needed, *arguments]).params
    except UsageError as error:
        return error.message


UsageError = typer.BadParameter.__base__
SIMULATIONS = ("simulate", "tune", "plan", "place")


@pytest.mark.parametrize("command", SIMULATIONS)
@pytest.mark.parametrize(
    ("other", "says"),
    [
        ("--max-num-seqs", "write --max-running N"),
        ("--max_num_seqs=8", "write --max-running N"),
        ("--max-prefill-tokens", "--max-batched-tokens N bounds a step"),
        ("--async-scheduling", "write --depth 2"),
        ("--schedule-policy", "write --order NAME"),
        ("--num-scheduler-steps", "write --max-iterations N"),
    ],
)
def test_commands_that_simulate_give_hints_too(command, other, says):
    assert f"{other.partition('=')[0]} is not a flag of Shoal: " in (message := tried(command, other, "8"))
    assert says in message


@pytest.mark.parametrize("command", ["simulate", "tune"])
@pytest.mark.parametrize(
    ("other", "says"), [("--swap-space", "write --swap SIZE"), ("--mem-fraction-static", "write --kv-memory")]
)
def test_a_simulation_of_given_engines_has_the_hints_of_their_memory(command, other, says):
    assert says in tried(command, other, "8")


@pytest.mark.parametrize("other", OWN_ALIASES)
def test_flags_of_other_commands_are_read_by_commands_that_have_them(other):
    ours = OWN_ALIASES[other]
    assert other in HINTS
    for command in ("simulate", "tune"):
        assert tried(command, other, "3") == tried(command, f"{other}=3") == tried(command, ours, "3")
        assert tried(command, other, "3") != tried(command)


@pytest.mark.parametrize("command", COMMANDS)
def test_hints_name_only_flags_of_the_command(command):
    flags = flags_of(command)
    for other, says in HINTS.items():
        if hint(other, flags) is not None:
            assert set(re.findall(r"--[a-z-]+", says)) <= flags, other


@pytest.mark.parametrize("command", SIMULATIONS)
@pytest.mark.parametrize(
    "other", ["--temperature", "--enable-sleep-mode", "--pp-size", "--n-gpu-layers", "--ssl-keyfile"]
)
def test_hints_about_running_engines_are_not_for_simulated_ones(command, other):
    assert tried(command, other, "1") == f"No such option: {other}"


def test_other_commands_keep_their_own_flags():
    """--model and --seed are flags of ``generate``; an empty prompt stays one."""
    generate = typer.main.get_command(app).commands["generate"]
    given = generate.make_context(
        "generate", ["--model", "smollm2", "", "--seed", "3", "x=y", "--", "-m"]
    ).params
    assert (given["model"], given["seed"], list(given["prompts"])) == ("smollm2", 3, ["", "x=y", "-m"])
    with pytest.raises(typer.BadParameter, match="write --kv-memory SIZE"):
        generate.make_context("generate", ["--gpu-memory-utilization", "0.5"])


def test_variables_of_other_servers_are_reported_as_ignored(served, monkeypatch, capsys):
    assert run(["serve", "smollm2"]) == 0
    assert "no effect" not in capsys.readouterr().err
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")
    assert run(["serve", "smollm2"]) == 0
    notes = capsys.readouterr().err
    assert all(f"note     {name} has no effect here; write {VARIABLES[name]}" in notes for name in VARIABLES)
    assert served[0] == served[1]
