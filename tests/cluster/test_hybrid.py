"""With KV or by tokens: budgets hold, who relieves an engine goes first, and who fits is not kept waiting."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.cluster.manager.events import MigrationMethod
from shoal.cluster.packing import EpochSpending, MigrationBudgets, MigrationCandidate, choose_methods
from shoal.core import ConfigError

HOSTS = {"a": "x", "b": "x", "c": "y", "d": "z"}
LIVE, TOKENS = MigrationMethod.LIVE, MigrationMethod.TOKENS

budgets = st.one_of(st.none(), st.integers(0, 12))
pairs = st.permutations(sorted(HOSTS)).map(lambda names: names[:2])


def want(
    request: str = "r",
    path: str = "ab",
    kv_bytes: int = 4,
    tokens: int = 2,
    *,
    relieves: bool = False,
    kv_transferable: bool = True,
) -> MigrationCandidate:
    return MigrationCandidate(
        request=request,
        source=path[0],
        target=path[1],
        kv_bytes=kv_bytes,
        tokens=tokens,
        relieves=relieves,
        kv_transferable=kv_transferable,
        hosts=(HOSTS[path[0]], HOSTS[path[1]]),
    )


wanted_moves = st.lists(
    st.builds(
        lambda pair, kv_bytes, tokens, relieves, kv_transferable: want(
            "", "".join(pair), kv_bytes, tokens, relieves=relieves, kv_transferable=kv_transferable
        ),
        pairs,
        st.integers(0, 6),
        st.integers(1, 6),
        st.booleans(),
        st.booleans(),
    ),
    max_size=8,
).map(
    lambda moves: [
        want(
            f"r{number}",
            move.source + move.target,
            move.kv_bytes,
            move.tokens,
            relieves=move.relieves,
            kv_transferable=move.kv_transferable,
        )
        for number, move in enumerate(moves)
    ]
)


def overspent(moves: Sequence[tuple[MigrationCandidate, MigrationMethod]], limits: MigrationBudgets) -> bool:
    """Whether moves by these methods exceed a budget: counted link by link, from the whole list."""
    engines: Counter[str] = Counter()
    hosts: Counter[str] = Counter()
    prefill: Counter[str] = Counter()
    for move, method in moves:
        if method is TOKENS:
            prefill[move.target] += move.tokens
            continue
        engines[move.source] += move.kv_bytes
        engines[move.target] += move.kv_bytes
        if HOSTS[move.source] != HOSTS[move.target]:
            hosts[HOSTS[move.source]] += move.kv_bytes
            hosts[HOSTS[move.target]] += move.kv_bytes
    spent = ((engines, limits.engine_bytes), (hosts, limits.host_bytes), (prefill, limits.prefill_tokens))
    return any(most is not None and max(count.values(), default=0) > most for count, most in spent)


@given(wanted=wanted_moves, engine=budgets, host=budgets, prefill=budgets)
@settings(max_examples=examples(400))
def test_each_migration_takes_the_first_method_within_the_remaining_budgets(
    wanted: list[MigrationCandidate], engine: int | None, host: int | None, prefill: int | None
) -> None:
    limits = MigrationBudgets(engine, host, prefill)
    chosen = choose_methods(wanted, EpochSpending(limits))
    assert chosen == choose_methods(wanted, EpochSpending(limits))
    by_rank = [move for move in wanted if move.relieves] + [move for move in wanted if not move.relieves]
    before: list[tuple[MigrationCandidate, MigrationMethod]] = []
    for move in by_rank:
        methods = [LIVE, TOKENS] if move.kv_transferable else [TOKENS]
        fitting = [method for method in methods if not overspent([*before, (move, method)], limits)]
        assert chosen.get(move.request) == (fitting[0] if fitting else None)
        if fitting:
            before.append((move, fitting[0]))
    assert not overspent(before, limits)
    assert len(chosen) == len(before)


def test_kv_goes_while_every_link_of_the_path_takes_it_then_tokens_then_nothing() -> None:
    spending = EpochSpending(MigrationBudgets(8, None, 3))
    wanted = [want(f"r{number}", "ab") for number in range(5)]
    assert choose_methods(wanted, spending) == {"r0": LIVE, "r1": LIVE, "r2": TOKENS}
    # What is left at the destination of others is not theirs.
    assert spending.choose(want("r5", "cd")) is LIVE
    assert spending.choose(want("r6", "ca", tokens=3)) is TOKENS


def test_links_between_hosts_are_spent_only_between_hosts() -> None:
    spending = EpochSpending(MigrationBudgets(host_bytes=4, prefill_tokens=0))
    assert [spending.choose(want(path=path)) for path in ("ab", "ab", "ac", "bd", "ab", "cd")] == [
        LIVE,
        LIVE,
        LIVE,
        None,  # host x has sent 4 bytes
        LIVE,
        None,  # host y has taken them
    ]


def test_relieving_migrations_go_first_and_small_ones_pass_large_ones() -> None:
    wanted = [want("early", kv_bytes=3), want("large", kv_bytes=6), want("relief", kv_bytes=5, relieves=True)]
    chosen = choose_methods(wanted, EpochSpending(MigrationBudgets(8, None, 0)))
    assert chosen == {"relief": LIVE, "early": LIVE}


def test_without_budgets_every_migration_sends_kv_if_possible() -> None:
    wanted = [want("kv", kv_bytes=1 << 60), want("tokens", tokens=1 << 60, kv_transferable=False)]
    chosen = choose_methods(wanted, EpochSpending(MigrationBudgets()))
    assert chosen == {"kv": LIVE, "tokens": TOKENS}


@pytest.mark.parametrize("limits", [(-1, None, None), (None, -1, None), (None, None, -1)])
def test_budgets_below_nothing_are_refused(limits: tuple[int | None, int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="0 or more"):
        MigrationBudgets(*limits)
