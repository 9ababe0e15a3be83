"""Options that the commands which plan have in common."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.config.scenario_flags import SCENARIO_FLAGS

WANTED = "What is wanted"
SEARCH = "Search"
RESULTS = "Results"
_NOT_TAKEN = {"model", "device", "tp", "clients", "engines", "dispatch", "kv-memory", "kv-tokens"}
_NOT_TAKEN |= {"kv-cache-dtype", "prefix-caching", "swap"}
PLAN_FLAGS = tuple(flag for flag in SCENARIO_FLAGS if flag.name not in _NOT_TAKEN)
"""Of a scenario's flags those that planning heeds."""

Slo = Annotated[
    str | None,
    typer.Option(
        "--slo",
        metavar="KEY=VALUE[,..]",
        help="Latency goals of services without their own: ttft=2s,tpot=100ms, e2e=20s or e2e_scale=5.",
        rich_help_panel=WANTED,
    ),
]
Attainment = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Share of the requests of every service that are to meet their goals.",
        rich_help_panel=WANTED,
    ),
]
SearchShare = Annotated[
    str,
    typer.Option(
        metavar="SHARE",
        help="Share of the requests, the earliest, that is planned for; the rest is held out.",
        rich_help_panel=SEARCH,
    ),
]
ServerFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="Write the plan as shoal.yaml, for shoal serve; - is standard output.",
        rich_help_panel=RESULTS,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Write all that was looked at as JSON; - is standard output.",
        rich_help_panel=RESULTS,
    ),
]
