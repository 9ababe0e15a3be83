"""Flags of ``shoal serve`` for API keys and logging."""

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app, run

runner = CliRunner()


@pytest.fixture
def served(monkeypatch):
    """Options of the servers that were run."""
    options = []
    monkeypatch.setattr(
        "shoal.serve.launch.run_server", lambda engines, server, *_, **__: options.append(server)
    )
    return options


def keys(options):
    return [key.key for key in options.named_api_keys()]


def test_keys_may_be_repeated_or_come_from_the_environment(served, monkeypatch):
    assert run(["serve", "smollm2", "--api-key", "one", "--api-key", "two"]) == 0
    monkeypatch.setenv("SHOAL_API_KEY", "three four")
    assert run(["serve", "smollm2"]) == 0
    assert run(["serve", "smollm2", "--api-key", "five"]) == 0
    assert [keys(options) for options in served] == [["one", "two"], ["three", "four"], ["five"]]


def test_keys_from_a_file_are_joined_with_the_flags(served, tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text("api_keys: [{name: alice, key: one}]")
    assert run(["serve", "smollm2", "--api-key-file", str(file), "--api-key", "two"]) == 0
    assert keys(served[0]) == ["two", "one"]


def test_without_keys_requests_need_none(served, monkeypatch):
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert (
        run(["serve", "smollm2", "--cors-origins", "https://a.org", "--cors-origins", "https://b.org"]) == 0
    )
    assert keys(served[0]) == []
    assert served[0].cors_origins == ("https://a.org", "https://b.org")


def test_unknown_fields_of_requests_can_be_refused(served, capsys):
    assert run(["serve", "smollm2", "--unknown-fields", "refuse"]) == 0
    assert run(["serve", "smollm2"]) == 0
    assert [options.unknown_fields for options in served] == ["refuse", "ignore"]
    assert run(["serve", "smollm2", "--unknown-fields", "refused"]) != 0
    assert "did you mean 'refuse'" in capsys.readouterr().err


def test_help_shows_no_key(monkeypatch):
    for variable in ("SHOAL_API_KEY", "SHOAL_ADMIN_KEY"):
        monkeypatch.setenv(variable, "sk-hidden")
    for command in ("serve", "engines list", "services list"):
        shown = runner.invoke(app, [*command.split(), "--help"], terminal_width=200).output
        assert "SHOAL_ADMIN_KEY" in shown
        assert "sk-hidden" not in shown
    assert "SHOAL_API_KEY" in runner.invoke(app, ["serve", "--help"], terminal_width=200).output


def test_the_admin_key_comes_from_a_flag_a_file_or_the_environment(served, monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("SHOAL_ADMIN_KEY", raising=False)
    file = tmp_path / "admin.key"
    file.write_text("sk-file\n")
    assert run(["serve", "smollm2"]) == 0
    assert run(["serve", "smollm2", "--admin-key", "sk-flag"]) == 0
    assert run(["serve", "smollm2", "--admin-key-file", str(file)]) == 0
    monkeypatch.setenv("SHOAL_ADMIN_KEY", "sk-environment")
    assert run(["serve", "smollm2"]) == 0
    assert [options.admin_secret for options in served] == [None, "sk-flag", "sk-file", "sk-environment"]
    assert run(["serve", "smollm2", "--admin-key-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert "write admin_key or admin_key_file, not both" in error
    assert "sk-" not in error


def test_a_missing_admin_key_file_is_rejected(served, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("SHOAL_ADMIN_KEY", raising=False)
    assert run(["serve", "smollm2", "--admin-key-file", str(tmp_path / "none")]) == 2
    assert "server.admin_key_file: cannot read the key file" in capsys.readouterr().err


def test_several_devices_are_several_engines(monkeypatch):
    seen = []
    monkeypatch.setattr("shoal.serve.launch.run_server", lambda *arguments, **_: seen.append(arguments))
    flags = ["--device", "cpu", "--device", "cpu", "--dispatch", "round-robin", "--cluster-name", "mine"]
    assert run(["serve", "smollm2", *flags]) == 0
    [(plans, _, cluster)] = seen
    assert [(plan.name, plan.options.device) for plan in plans] == [("0", "cpu"), ("1", "cpu")]
    assert (cluster.dispatch, cluster.name) == ("round-robin", "mine")


@pytest.mark.parametrize(
    "command",
    [["generate", "--model", "smollm2", "hi"], ["profile", "smollm2"], ["chat", "smollm2"]],
)
def test_other_commands_run_one_engine(command, capsys):
    assert run([*command, "--device", "cpu", "--device", "cpu"]) == 2
    assert "devices: write exactly one device for this command, got 2" in capsys.readouterr().err


def test_a_key_for_an_unknown_service_is_rejected_before_loading(tmp_path, capsys):
    file = tmp_path / "keys.yaml"
    file.write_text("api_keys: [{name: alice, key: sk-hidden, services: [gpt]}]")
    assert run(["serve", "smollm2", "--port", "0", "--api-key-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert "'alice' names the service 'gpt'" in error
    assert "sk-hidden" not in error


def test_the_level_of_the_log_is_a_flag(served, capsys):
    assert run(["serve", "smollm2"]) == 0
    assert run(["serve", "smollm2", "--log-level", "error"]) == 0
    assert [options.log_level for options in served] == ["info", "error"]
    assert run(["serve", "smollm2", "--log-level", "debug"]) == 2
    assert "expected one of info, warning, error" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("variable", "key"), [("SHOAL_API_KEY", "api_keys"), ("SHOAL_ADMIN_KEY", "admin_key")]
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "set but empty"),
        ("  ", "set but empty"),
        ("${KEY}", "not expanded"),
        ("sk-\u00e4", "visible ASCII"),
    ],
)
def test_an_empty_key_variable_is_named(served, monkeypatch, capsys, variable, key, value, message):
    for name in ("SHOAL_API_KEY", "SHOAL_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    assert run(["serve", "smollm2"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{variable}: server.{key}" in error
    assert message in error
    flag = f"--{variable.removeprefix('SHOAL_').lower().replace('_', '-')}"
    assert run(["serve", "smollm2", flag, "sk-flag"]) == 0
    assert not served[1:]


def test_an_empty_key_is_rejected_by_clients(capsys):
    assert run(["services", "list", "--admin-key", ""]) == 2
    assert "this one is empty (here --admin-key or SHOAL_ADMIN_KEY gives it)" in capsys.readouterr().err
