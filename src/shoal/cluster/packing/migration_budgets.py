"""Migration budgets: whether a migration sends KV or recomputes it from tokens, within limits per epoch.

KV uses the links on its path; tokens are recomputed at the destination. Both have a budget per epoch, so that
migrations do not slow down running requests. Mell (section V) chooses a method for each migration; the
budgets and the order are ours.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster.manager.events import MigrationMethod
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationCandidate:
    """A running request that is to migrate to another engine."""

    request: str
    source: str
    """The engine that has it."""
    target: str
    kv_bytes: int
    tokens: int
    """Tokens to recompute if the KV is not sent."""
    relieves: bool
    """Whether the source is over its memory."""
    kv_transferable: bool
    """Whether its KV can be sent there at all."""
    hosts: tuple[str, str]
    """Machines of source and target."""


@dataclass(frozen=True, slots=True)
class MigrationBudgets:
    """Limits on migrations in one epoch; None: unlimited. ``shoal profile --links`` measures them."""

    engine_bytes: int | None = None
    """KV over the link of each engine, both directions together."""
    host_bytes: int | None = None
    """KV between each host and other hosts, both directions together."""
    prefill_tokens: int | None = None
    """Tokens that each engine recomputes for requests that arrive without KV."""

    def __post_init__(self) -> None:
        """Raises ConfigError for negative limits."""
        budgets = (self.engine_bytes, self.host_bytes, self.prefill_tokens)
        if any(most is not None and most < 0 for most in budgets):
            raise ConfigError(f"budgets of moves are 0 or more, got {self}")


class EpochSpending:
    """What one epoch has spent of the budgets."""

    def __init__(self, budgets: MigrationBudgets) -> None:
        self._budgets = budgets
        self._engine_bytes: Counter[str] = Counter()
        self._host_bytes: Counter[str] = Counter()
        self._prefill_tokens: Counter[str] = Counter()

    def choose(self, candidate: MigrationCandidate) -> MigrationMethod | None:
        """Choose the method of a migration and spend its budget; None: the budgets do not allow it.

        LIVE if all links on the path have budget left, else TOKENS.
        """
        engines = (candidate.source, candidate.target)
        hosts = set(candidate.hosts) if candidate.hosts[0] != candidate.hosts[1] else set()
        budgets, size = self._budgets, candidate.kv_bytes
        carried = all(_fits(self._engine_bytes[name], size, budgets.engine_bytes) for name in engines)
        carried = carried and all(_fits(self._host_bytes[host], size, budgets.host_bytes) for host in hosts)
        if candidate.kv_transferable and carried:
            self._engine_bytes.update(dict.fromkeys(engines, size))
            self._host_bytes.update(dict.fromkeys(hosts, size))
            return MigrationMethod.LIVE
        if _fits(self._prefill_tokens[candidate.target], candidate.tokens, budgets.prefill_tokens):
            self._prefill_tokens[candidate.target] += candidate.tokens
            return MigrationMethod.TOKENS
        return None


def choose_methods(
    wanted: Sequence[MigrationCandidate], spending: EpochSpending
) -> dict[str, MigrationMethod]:
    """Methods by request; requests without one do not migrate in this epoch.

    Migrations that relieve an engine come first, then the others in order. One that exceeds the budgets does
    not block later ones.
    """
    chosen: dict[str, MigrationMethod] = {}
    for candidate in sorted(wanted, key=lambda each: not each.relieves):
        method = spending.choose(candidate)
        if method is not None:
            chosen[candidate.request] = method
    return chosen


def _fits(spent: int, more: int, most: int | None) -> bool:
    return most is None or spent + more <= most
