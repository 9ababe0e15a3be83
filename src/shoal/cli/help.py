"""Layout of ``--help``: plain text in groups, wrapped to the terminal's width."""

import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from typer.core import TyperCommand, TyperGroup

MAX_WIDTH = 100
_NAMES_WIDTH = 26
"""Longer names get a line of their own, above their text."""
_KEPT = "\0"  # a space at which no line is broken
_TYPE = re.compile(r" <.*>$")
_MARKUP = re.compile(r"\*\*|`")


class PlainHelp:
    """Mixin that prints help with ``help_lines``; must be the first base of a command or group."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        assert isinstance(self, TyperCommand | TyperGroup)
        width = ctx.terminal_width or shutil.get_terminal_size().columns
        formatter.write("\n".join(help_lines(self, ctx, min(width, MAX_WIDTH))) + "\n")


def help_lines(command: TyperCommand | TyperGroup, ctx: Any, width: int) -> Iterator[str]:
    """Usage, text and parameters of a command; only single words make lines longer than ``width`` columns."""
    usage = " ".join(command.collect_usage_pieces(ctx))
    yield from _wrapped(f"Usage: {ctx.command_path} {usage}", width, hanging="    ")
    yield from _text(command.help or "", width)
    for title, rows in _groups(command, ctx).items():
        yield ""
        yield f"{title}:"
        for names, text in rows:
            yield from _row(names, text, width)
    yield from _text(command.epilog or "", width)


def _text(text: str, width: int) -> Iterator[str]:
    """Paragraphs; consecutive example commands are indented, without empty lines between them."""
    follows_example = False
    for paragraph in filter(None, re.split(r"\n\s*\n", text.strip())):
        words = " ".join(paragraph.split())
        example = re.fullmatch(r"`([^`]*)`", words)
        if example is None or not follows_example:
            yield ""
        yield from _wrapped(_MARKUP.sub("", words), width) if example is None else _example(example[1], width)
        follows_example = example is not None


def _example(command: str, width: int) -> Iterator[str]:
    """A command as it is typed; line breaks do not separate a flag from its value or cut quoted text."""
    pieces = re.sub(r"'[^']*'|\"[^\"]*\"", lambda quoted: quoted[0].replace(" ", _KEPT), command)
    pieces = re.sub(r"(\s--?\S+) (?!-)", rf"\1{_KEPT}", pieces)
    lines = _wrapped(pieces, width - 4, hanging="    ")
    yield from (f"  {line}" + (" \\" if number < len(lines) else "") for number, line in enumerate(lines, 1))


def _groups(command: TyperCommand | TyperGroup, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Names and texts of arguments, commands and options, by title of their group."""
    groups: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    if isinstance(command, TyperGroup):
        commands = [(name, command.get_command(ctx, name)) for name in command.list_commands(ctx)]
        groups["Commands"] = [
            (name, _first_sentence(each.help or "")) for name, each in commands if each and not each.hidden
        ]
    defaults: Mapping[str, str] = getattr(command.callback, "flag_defaults", dict)()
    options: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is None:
            continue
        names, text = record
        if parameter.name in defaults:
            text += f"  [default: {defaults[parameter.name]}]"
        if parameter.param_type_name == "argument":
            groups["Arguments"].append((_TYPE.sub("", names), text))
        elif (panel := getattr(parameter, "rich_help_panel", None)) is not None:
            groups.setdefault(panel, []).append((names, text))
        else:
            options.append((names, text))
    groups["Options"] = options  # last: most commands have the same ones
    return {title: rows for title, rows in groups.items() if rows}


def _first_sentence(text: str) -> str:
    return " ".join(re.split(r"\n\s*\n", text.strip())[0].split())


def _row(names: str, text: str, width: int) -> Iterator[str]:
    """A parameter or command: short names on the line of the text, long names above it."""
    indent = " " * (_NAMES_WIDTH + 2)
    lines = list(_wrapped(_MARKUP.sub("", text), width - len(indent)))
    if len(names) > _NAMES_WIDTH - 2:
        yield f"  {names}"
        yield from (indent + line for line in lines)
        return
    first, *rest = lines or [""]
    yield f"  {names}".ljust(len(indent)) + first if first else f"  {names}"
    yield from (indent + line for line in rest)


def _wrapped(text: str, width: int, hanging: str = "") -> list[str]:
    """Lines of at most ``width`` columns; short text in brackets, such as a default, is not broken."""
    kept = re.sub(r"\[[^][]{,30}\]", lambda note: note[0].replace(" ", _KEPT), text)
    lines = textwrap.wrap(
        kept, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace(_KEPT, " ") for line in lines]
