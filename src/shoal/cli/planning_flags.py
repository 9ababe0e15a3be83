"""Options that the commands which plan have in common, and what they ask for."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from shoal.cli.flags import share_flag
from shoal.config.scenario_flags import SCENARIO_FLAGS
from shoal.config.setting_tree import Table

if TYPE_CHECKING:
    from shoal.config.scenario import Scenario
    from shoal.plan.demand import Demand
    from shoal.plan.goals import Wanted

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


class Asked(NamedTuple):
    """What a command is asked to plan."""

    scenario: "Scenario"
    """As it is written."""
    wanted: "Wanted"
    """Which share of the goals is to be met, and how far to look."""
    demand: "Demand"
    """Services, requests and devices."""


def read_asked(
    devices: Path,
    config: Path | None,
    settings: Table,
    slo: str | None,
    attainment: str,
    search_share: str,
    *,
    trials: int = 1,
    to_serve: bool,
) -> Asked:
    """Read the scenario and the catalogue; raises ConfigError for the first mistake.

    to_serve: also for what only simulations have.
    """
    from shoal.config.scenario_file import load_scenario
    from shoal.plan.catalog import load_catalogue
    from shoal.plan.demand import build_demand
    from shoal.plan.deployment import check_servable
    from shoal.plan.goals import Wanted, read_goals

    share = share_flag(attainment, "--attainment", whole=True)
    scenario = load_scenario(file=config, flags=settings)
    catalogue = load_catalogue(devices)
    if to_serve:
        check_servable(scenario, catalogue)
    wanted = Wanted(
        attainment=share,
        trials=trials,
        share=share_flag(search_share, "--search-share", whole=False),
        seed=scenario.workload.seed,
    )
    return Asked(scenario, wanted, build_demand(scenario, catalogue, read_goals(slo)))
