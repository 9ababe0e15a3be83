"""The base class of all commands."""

from typing import Any

import typer
from typer.core import TyperCommand


class Command(TyperCommand):
    """Rejects an option that is given twice but takes one value; otherwise the last would win silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; raises BadParameter."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for parameter in set[Any](given):
            count = given.count(parameter)
            if count > 1 and not (parameter.multiple or parameter.is_flag):
                raise typer.BadParameter(f"given {count} times, but takes one value", ctx, parameter)
        return super().parse_args(ctx, args)
