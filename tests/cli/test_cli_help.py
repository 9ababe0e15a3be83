"""Help is plain text that fits the terminal, in groups, with defaults and commands to copy."""

import re
import shlex

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app

TOP = "serve generate chat demo profile topology simulate tune plan place version"
BELOW = ("models", "engines", "services", "models pull", "engines add", "services add")
COMMANDS = ["", *TOP.split(), *BELOW]


def shown(command: str, width: int) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"], terminal_width=width)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_no_name_is_cut_and_no_line_is_too_long(command: str) -> None:
    wide, narrow = shown(command, 200), shown(command, 80)
    assert all(len(line) <= 100 for line in wide.splitlines())
    assert all(len(line) <= 80 for line in narrow.splitlines() if " " in line.strip())
    assert "…" not in narrow
    assert "`" not in narrow
    assert "**" not in narrow
    assert "<bool>" not in narrow
    words = [word for word in wide.split() if word != "\\"]
    assert [word for word in narrow.split() if word != "\\"] == words


@pytest.mark.parametrize("width", [80, 100])
def test_examples_can_be_copied(width: int) -> None:
    lines = shown("generate", width).splitlines()
    first = lines.index("Examples:") + 2
    text = "\n".join(lines[first : lines.index("", first)])
    commands = [shlex.split(line) for line in text.replace("\\\n", " ").splitlines()]
    assert [words[:2] for words in commands] == [["shoal", "generate"]] * len(commands)
    assert commands[1][-2:] == ["Why is the sky blue?", "Why is grass green?"]


def test_flags_are_in_groups_with_defaults() -> None:
    text = " ".join(shown("serve", 80).split())
    titles = ["Arguments", "Services and engines", "KV memory", "Scheduler", "Cluster", "Server", "Options"]
    assert sorted(titles, key=lambda title: text.index(f"{title}:")) == titles
    for flag, default in (("--block-size", "16"), ("--port", "8000"), ("--preset", "shoal")):
        assert f"[default: {default}]" in text[text.rindex(f"{flag} ") :].split(" --", 1)[0]


def test_a_group_lists_its_commands_by_their_first_sentence() -> None:
    text = " ".join(shown("models", 80).split())
    assert re.search(r"Commands: list [A-Z][^.]+\. pull [A-Z][^.]+\. Options:", text)
