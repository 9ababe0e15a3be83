"""Drains, deaths and the engine link of scenarios, and the migrations in simulation that follow from them."""

from shoal.config.scenario import Scenario
from shoal.config.scenario_pool import Pools
from shoal.config.sections import Section, section_of
from shoal.config.value_kinds import byte_rate
from shoal.core import ConfigError
from shoal.core.cluster import Link
from shoal.simulate import Deaths, MigrationSpec


def engine_link_section() -> Section:
    """Link between engines, for migrations."""
    return section_of(Link, {(Link, "bytes_per_s"): byte_rate()}, {"bytes_per_s": "bandwidth"})


def migrations_of(scenario: Scenario, pools: Pools) -> MigrationSpec:
    """Drains, packing and link; raises ConfigError for a link if the size of KV is unknown."""
    if scenario.link is not None and not pools.sized:
        raise ConfigError(
            "link: nothing says how many bytes of KV would move; write the services' models (services: "
            "[{name: chat, model: llama-3.1-8b}]), or leave out link: then KV is recomputed"
        )
    drains = [(incident.at_s, incident.engine) for incident in scenario.drains]
    return MigrationSpec(link=scenario.link, drains=drains, packing=scenario.packing)


def deaths_of(scenario: Scenario) -> Deaths:
    """Deaths of engines, and their load time."""
    times = [(incident.at_s, incident.engine) for incident in scenario.deaths]
    return Deaths(times=times, load_s=scenario.load_s)


def check_data_parallel(scenario: Scenario) -> None:
    """Raise ConfigError for settings that exclude data-parallel ranks."""
    written = {"link": scenario.link, "drains": scenario.drains, "deaths": scenario.deaths}
    for name, value in written.items():
        if value:
            raise ConfigError(f"latency.data_parallel: a group of ranks is one engine; leave out {name}")
