"""Accounts of clients for fair shares: what each has used, in priced tokens over its share.

The rules are those of VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): prompts are
charged when they are admitted, outputs token by token, and a client that comes back is lifted to the least of
those that wait, so that nobody saves up while idle.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core import Client

_GIB = 2**30


class TokenPrices(NamedTuple):
    """Prices of a token of a model with 1 GiB of weights; they grow with the size of the weights."""

    prompt: float
    output: float


@dataclass(slots=True, eq=False)
class Account:
    """What one client has used."""

    number: int
    """By the order of the clients' first requests."""
    share: float
    tokens: float = 0.0
    """Priced tokens over the share."""
    num_waiting: int = 0
    """Waiting requests."""


NO_ACCOUNT = Account(0, 1.0)
"""Of requests of orders that do not read accounts; nothing is ever charged to it."""


class ClientAccounts:
    """All accounts of one engine."""

    def __init__(self, prices: TokenPrices) -> None:
        self._prices = prices
        self._accounts: dict[str | None, Account] = {}
        self._last_tokens = 0.0
        """Of the client that had waiting requests last, when it had none left."""

    def of(self, client: Client | None) -> Account:
        """A client's account; None: one for all requests without a client."""
        name = None if client is None else client.name
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(len(self._accounts), 1.0)
        account.share = 1.0 if client is None else client.share
        return account

    def arrived(self, account: Account) -> None:
        """A new request of a client begins to wait; to be called before ``waits``."""
        if account.num_waiting:
            return
        waiting = [each.tokens for each in self._accounts.values() if each.num_waiting]
        account.tokens = max(account.tokens, min(waiting, default=self._last_tokens))

    def waits(self, account: Account) -> None:
        """A request of a client begins to wait, for the first time or again."""
        account.num_waiting += 1

    def waits_no_more(self, account: Account) -> None:
        """A request of a client was admitted, or ended while it was waiting."""
        account.num_waiting -= 1
        if not account.num_waiting:
            self._last_tokens = account.tokens

    def charge_prompt(self, account: Account, tokens: int, weight_bytes: int) -> None:
        """Charge the prompt tokens that a request computes. weight_bytes: of its service."""
        account.tokens += tokens * prompt_price(account, self._prices, weight_bytes)

    def charge_outputs(self, charges: Iterable[tuple[Account, int]], weight_bytes: int) -> None:
        """Charge output tokens of some requests of one service, by account."""
        price = self._prices.output * _size(weight_bytes)
        for account, tokens in charges:
            account.tokens += tokens * price / account.share


def prompt_price(account: Account, prices: TokenPrices, weight_bytes: int) -> float:
    """What a prompt token costs a client."""
    return prices.prompt * _size(weight_bytes) / account.share


def _size(weight_bytes: int) -> float:
    """The size of weights in GiB, as a factor of prices; 1 where it is unknown."""
    return weight_bytes / _GIB if weight_bytes else 1.0
