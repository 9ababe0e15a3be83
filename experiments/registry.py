"""All experiments by name; their modules are imported on demand."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module

from experiments.result import Effort, Result
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """One experiment of a paper."""

    name: str
    """On the command line."""
    paper: str
    """The paper, and its tables or figures."""
    measures: str
    """One line for the list of experiments."""
    run: Callable[[Effort], Result]
    """Deterministic, unless it is ``real``: the same effort gives the same result."""
    real: bool = False
    """Whether it runs real engines on this machine, so that ``all`` leaves it out."""


_MODULES: dict[str, str] = {
    "past-future-table1": "past_future.table1",
    "past-future-variants": "past_future.variants",
    "past-future-goodput": "past_future.goodput",
    "past-future-parameters": "past_future.parameters",
    "past-future-windows": "past_future.windows",
    "scls-throughput": "scls.throughput",
    "scls-ablation": "scls.ablation",
    "scls-slice-length": "scls.slice_length",
    "scls-scalability": "scls.scalability",
    "scls-balance": "scls.balance",
    "scls-padded": "scls.padded_engines",
    "seallm-schedulers": "seallm.schedulers",
    "seallm-skew": "seallm.skew",
    "seallm-slo-scale": "seallm.slo_scale",
    "seallm-variance": "seallm.variance",
    "seallm-end-to-end": "seallm.end_to_end",
    "seallm-ablation": "seallm.ablation",
    "seallm-density": "seallm.density",
    "seallm-placement-time": "seallm.placement_time",
    "seallm-replacement": "seallm.re_placement",
    "uellm-batching": "uellm.batching",
    "uellm-deployment": "uellm.deployment",
    "uellm-end-to-end": "uellm.end_to_end",
    "mell-devices": "mell.devices",
    "mell-migrations": "mell.migrations",
    "mell-epochs": "mell.epochs",
    "mell-utilisation": "mell.utilisation",
    "mell-batching": "mell.batching",
    "mell-timeline": "mell.timeline",
    "mell-served": "mell.served",
    "mell-hybrid": "mell.hybrid",
}
"""Module of this package by name; it defines ``REPRODUCTION``."""


class _Registry(Mapping[str, Reproduction]):
    """Imports a module when its name is looked up."""

    def __getitem__(self, name: str) -> Reproduction:
        module = import_module(f"experiments.{_MODULES[name]}")
        found = module.REPRODUCTION
        assert isinstance(found, Reproduction)
        assert found.name == name
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


REPRODUCTIONS: Mapping[str, Reproduction] = _Registry()
"""Reproductions by name, in the order of the list."""


def find(names: Sequence[str], known: Mapping[str, Reproduction] = REPRODUCTIONS) -> list[Reproduction]:
    """Reproductions by name; raises ConfigError for unknown names, with the known ones."""
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(
                f"reproduction {name!r} is not known; {hint}`python -m experiments --list` describes: "
                + ", ".join(known)
            )
    return [known[name] for name in names]
