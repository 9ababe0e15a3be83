"""Flags for sampling parameters of ``generate`` and ``chat``; None: the service's default."""

from typing import Annotated, Any

import typer

from shoal.core import SamplingParams

_PANEL = "Sampling"

MaxTokens = Annotated[int | None, typer.Option(help="Most output tokens.", rich_help_panel=_PANEL)]
Temperature = Annotated[
    float | None,
    typer.Option(
        help="0 always takes the likeliest token. Parameters left out here have the service's defaults.",
        rich_help_panel=_PANEL,
    ),
]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the smallest nucleus this likely.", rich_help_panel=_PANEL)
]
TopK = Annotated[
    int | None, typer.Option(help="Sample from the k likeliest tokens; 0: all.", rich_help_panel=_PANEL)
]
MinP = Annotated[
    float | None,
    typer.Option(
        help="Leave out tokens less likely than this share of the likeliest.", rich_help_panel=_PANEL
    ),
]
RepetitionPenalty = Annotated[
    float | None, typer.Option(help="Above 1: repeat less.", rich_help_panel=_PANEL)
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.", rich_help_panel=_PANEL)]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends an output; may be repeated.", rich_help_panel=_PANEL)
]
Choices = Annotated[int, typer.Option("--n", help="Outputs for each prompt.", rich_help_panel=_PANEL)]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=_PANEL)
]


def given_sampling(**parameters: Any) -> dict[str, Any]:
    """The parameters that are not None; raises InvalidRequest for invalid values."""
    parameters = {name: value for name, value in parameters.items() if value is not None}
    SamplingParams(**parameters)
    return parameters
