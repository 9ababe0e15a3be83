"""Base classes of all commands: flags of other servers and renamed flags are translated here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.cli.help import PlainHelp
from shoal.config import RENAMED_FLAGS
from shoal.config.foreign_flags import ALIASES, HINTS, OWN_ALIASES, POSITIONAL, VALUES, hint, plain_name

F = TypeVar("F", bound=Callable[..., Any])


class Command(PlainHelp, TyperCommand):
    """A command that rejects an option given twice but taking one value; typer would use the last one.

    It accepts names of flags from other servers. For renamed flags, and for those that only other servers
    have, the error says what to write.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = list(self._translate(ctx, args))
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in set[Any](given):
            count = given.count(parameter)
            if count > 1 and not (parameter.multiple or parameter.is_flag):
                raise typer.BadParameter(f"given {count} times, but takes one value", ctx, parameter)
        return super().parse_args(ctx, args)

    def _translate(self, ctx: Any, args: Sequence[str]) -> Iterator[str]:
        """The arguments with Shoal's names of flags; raises BadParameter for flags that Shoal lacks."""
        known = {
            option: parameter
            for parameter in self.params
            for option in (*parameter.opts, *parameter.secondary_opts)
        }
        rest = iter(args)
        for argument in rest:
            if argument == "--":
                yield argument
                break
            if not argument.startswith("-"):
                yield argument
                continue
            flag, equals, value = argument.partition("=")
            if not argument.startswith("--") and flag not in HINTS:
                flag, equals, value = argument, "", ""
            name = self._resolve_flag(ctx, flag, known)
            if name != POSITIONAL and getattr(known.get(name), "is_flag", True):
                yield name + equals + value
                continue
            # After a flag that takes a value, the next argument is that value, even if it looks like a flag.
            values = [value] if equals else list(islice(rest, 1))
            values = [VALUES.get(name, {}).get(written, written) for written in values]
            yield from values if name == POSITIONAL else (name, *values)
        yield from rest

    def _resolve_flag(self, ctx: Any, flag: str, known: Mapping[str, Any]) -> str:
        """Shoal's name of ``flag``; raises BadParameter for an unknown flag that has a hint."""
        plain = plain_name(flag)
        if flag in known:
            return flag
        renamed = RENAMED_FLAGS.get(flag, "")
        if renamed.partition(" ")[0] in known:
            raise typer.BadParameter(f"{flag} is now called {renamed}", ctx)
        alias = ALIASES.get(plain)
        if alias in known or (alias == POSITIONAL and self._takes_models):
            return str(alias)
        if OWN_ALIASES.get(plain) in known:
            return OWN_ALIASES[plain]
        instead = hint(plain, known)
        if instead is not None:
            raise typer.BadParameter(f"{flag} is not a flag of Shoal: {instead}", ctx)
        return plain if plain in known else flag

    @property
    def _takes_models(self) -> bool:
        return any(parameter.name == "models" for parameter in self.params)


class Group(PlainHelp, TyperGroup):
    """A command with subcommands."""


class Commands(typer.Typer):
    """An application of subcommands: ``shoal``, or a part of it such as ``shoal models``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Decorator that adds a function as a subcommand."""
        return super().command(name, cls=Command, **settings)
