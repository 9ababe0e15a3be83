"""Flags of ``shoal serve`` that concern who may use it."""

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


def test_without_keys_nobody_needs_one(served, monkeypatch):
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    assert (
        run(["serve", "smollm2", "--cors-origins", "https://a.org", "--cors-origins", "https://b.org"]) == 0
    )
    assert keys(served[0]) == []
    assert served[0].cors_origins == ("https://a.org", "https://b.org")


def test_help_shows_no_key(monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", "sk-hidden")
    shown = runner.invoke(app, ["serve", "--help"], terminal_width=200).output
    assert "SHOAL_API_KEY" in shown
    assert "sk-hidden" not in shown


def test_a_key_for_a_service_that_is_not_there_is_found_before_anything_is_loaded(tmp_path, capsys):
    file = tmp_path / "keys.yaml"
    file.write_text("api_keys: [{name: alice, key: sk-hidden, services: [gpt]}]")
    assert run(["serve", "smollm2", "--port", "0", "--api-key-file", str(file)]) == 2
    error = capsys.readouterr().err
    assert "'alice' names the service 'gpt'" in error
    assert "sk-hidden" not in error
