"""How requests move between engines: with their KV or by their tokens, within what an epoch allows.

KV takes up the links on its path, tokens are computed anew at the destination. Both are budgeted for each
epoch, so that moves cannot slow down what runs. Source: Mell, section V, which chooses for each migration;
the budgets, and who goes first, are ours.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.cluster.manager.events import MoveMethod
from shoal.core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedMove:
    """A running request that is to go to another engine."""

    request: str
    """Its id."""
    source: str
    """The engine that has it."""
    target: str
    """The engine that is to have it."""
    kv_bytes: int
    """How much KV it has."""
    tokens: int
    """How many tokens that are: so many are computed anew where the KV stays behind."""
    relieves: bool
    """Whether the source lacks memory for what it runs."""
    moves_kv: bool
    """Whether its KV can go there at all."""
    hosts: tuple[str, str]
    """The machines of both engines."""


@dataclass(frozen=True, slots=True)
class MoveBudgets:
    """What moves may take in one epoch; None: as much as they like. ``shoal profile --links`` measures it."""

    engine_bytes: int | None = None
    """KV over the link of each engine, in both directions together."""
    host_bytes: int | None = None
    """KV over the link of each host, to and from other hosts together."""
    prefill_tokens: int | None = None
    """Tokens that each engine computes anew for requests that come without their KV."""

    def __post_init__(self) -> None:
        """Refuse less than nothing; raises ConfigError."""
        budgets = (self.engine_bytes, self.host_bytes, self.prefill_tokens)
        if any(most is not None and most < 0 for most in budgets):
            raise ConfigError(f"budgets of moves are 0 or more, got {self}")


class EpochSpending:
    """What is spent of the budgets in one epoch."""

    def __init__(self, budgets: MoveBudgets) -> None:
        self._budgets = budgets
        self._engine_bytes: Counter[str] = Counter()
        self._host_bytes: Counter[str] = Counter()
        self._prefill_tokens: Counter[str] = Counter()

    def choose(self, move: WantedMove) -> MoveMethod | None:
        """How a request is to move, which is spent from now on; None: it stays, as nothing has room for it.

        With its KV where all links of the path take it, else by its tokens.
        """
        engines = (move.source, move.target)
        hosts = set(move.hosts) if move.hosts[0] != move.hosts[1] else set()
        budgets, size = self._budgets, move.kv_bytes
        carried = all(_fits(self._engine_bytes[name], size, budgets.engine_bytes) for name in engines)
        carried = carried and all(_fits(self._host_bytes[host], size, budgets.host_bytes) for host in hosts)
        if move.moves_kv and carried:
            self._engine_bytes.update(dict.fromkeys(engines, size))
            self._host_bytes.update(dict.fromkeys(hosts, size))
            return MoveMethod.LIVE
        if _fits(self._prefill_tokens[move.target], move.tokens, budgets.prefill_tokens):
            self._prefill_tokens[move.target] += move.tokens
            return MoveMethod.TOKENS
        return None


def choose_methods(wanted: Sequence[WantedMove], spending: EpochSpending) -> dict[str, MoveMethod]:
    """How requests move, by id; who is not there stays where it is, for this epoch at least.

    Those that relieve an engine choose first, then the others, in their order; who does not fit lets those
    behind it pass.
    """
    chosen: dict[str, MoveMethod] = {}
    for move in sorted(wanted, key=lambda each: not each.relieves):
        method = spending.choose(move)
        if method is not None:
            chosen[move.request] = method
    return chosen


def _fits(spent: int, more: int, most: int | None) -> bool:
    return most is None or spent + more <= most
