"""The base classes of all commands."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from shoal.cli.help import PlainHelp
from shoal.config import RENAMED_FLAGS

F = TypeVar("F", bound=Callable[..., Any])


class Command(PlainHelp, TyperCommand):
    """Rejects an option that is given twice but takes one value; otherwise the last would win silently.

    Of a flag that got another name it tells the new one.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raises BadParameter."""
        self._refuse_renamed(ctx, args)
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in set[Any](given):
            count = given.count(parameter)
            if count > 1 and not (parameter.multiple or parameter.is_flag):
                raise typer.BadParameter(f"given {count} times, but takes one value", ctx, parameter)
        return super().parse_args(ctx, args)

    def _refuse_renamed(self, ctx: Any, args: Sequence[str]) -> None:
        known = {
            option for parameter in self.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        for argument in args:
            old_name = argument.partition("=")[0]
            new_name = RENAMED_FLAGS.get(old_name, "")
            if new_name.partition(" ")[0] in known and old_name not in known:
                raise typer.BadParameter(f"{old_name} is now called {new_name}", ctx)


class Group(PlainHelp, TyperGroup):
    """A command with commands below it."""


class Commands(typer.Typer):
    """Commands below one: ``shoal``, or a part of it such as ``shoal models``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, no_args_is_help=True, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        """Decorates a function that becomes one of the commands."""
        return super().command(name, cls=Command, **settings)
