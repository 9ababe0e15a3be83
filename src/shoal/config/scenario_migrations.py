"""What a scenario says of engines that are drained or die, and of requests that move between them."""

from shoal.config.scenario import Scenario
from shoal.config.scenario_pool import Pools
from shoal.config.sections import Section, section_of
from shoal.config.value_kinds import byte_rate
from shoal.core import ConfigError
from shoal.core.cluster import Link
from shoal.simulate import Deaths, MigrationSpec


def engine_link_section() -> Section:
    """How fast engines exchange KV."""
    return section_of(Link, {(Link, "bytes_per_s"): byte_rate()}, {"bytes_per_s": "bandwidth"})


def moving_of(scenario: Scenario, pools: Pools) -> MigrationSpec:
    """Drains, a packer's moves, and the link for both; raises ConfigError where no KV can be sent over it."""
    if scenario.link is not None and not pools.sized:
        raise ConfigError(
            "link: nothing says how many bytes of KV would move; write the services' models (services: "
            "[{name: chat, model: llama-3.1-8b}]), or leave out link: then KV is computed anew"
        )
    drains = [(incident.at_s, incident.engine) for incident in scenario.drains]
    return MigrationSpec(link=scenario.link, drains=drains, packing=scenario.packing)


def deaths_of(scenario: Scenario) -> Deaths:
    """Engines that die, and how soon they are back."""
    times = [(incident.at_s, incident.engine) for incident in scenario.deaths]
    return Deaths(times=times, load_s=scenario.load_s)


def check_alone(scenario: Scenario) -> None:
    """Refuse, for a group of ranks, what only engines of their own can do; raises ConfigError."""
    written = {"link": scenario.link, "drains": scenario.drains, "deaths": scenario.deaths}
    for name, value in written.items():
        if value:
            raise ConfigError(f"latency.data_parallel: a group of ranks is one engine; leave out {name}")
