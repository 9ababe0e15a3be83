"""The order ``fair``: what clients get, as VTC bounds it, over one service and several."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from orders_builders import FakeService, make_state, view_of
from schedule_builders import make_pool, make_request, make_scheduler

from shoal.core import Client, ConfigError, StepPlan, StepResult
from shoal.schedule.client_accounts import Account, ClientAccounts, TokenPrices
from shoal.schedule.policies.orders.fair import Fair, FairQueue

STEP_NS = 1_000
PRICES = TokenPrices(1.0, 2.0)
A, B, C = Client("a"), Client("b"), Client("c")


def queued(*clients: tuple[str, int], tokens: dict[str, float] | None = None, share=None, prompt: int = 10):
    """(waiting, accounts): requests by client and arrival, together as the order's rank has them."""
    accounts: dict[str, Account] = {}
    for name, _ in clients:
        if name not in accounts:
            own = (share or {}).get(name, 1.0)
            accounts[name] = Account(len(accounts), own, (tokens or {}).get(name, 0.0))
    states = []
    for name, arrival in clients:
        state = make_state(prompt=prompt, arrival_s=arrival)
        state.account = accounts[name]
        state.rank = float(state.account.number)
        states.append((state, name))
    states.sort(key=lambda pair: (pair[0].rank, pair[0].arrival_ns, pair[0].number))
    return [state for state, _ in states], {id(state): name for state, name in states}


def order_of(waiting, names, weight_bytes: int = 0) -> str:
    return "".join(names[id(state)] for state in FairQueue(waiting, weight_bytes, PRICES))


def test_clients_take_turns_by_what_they_have_used():
    waiting, names = queued(*[("a", 0)] * 4, ("b", 5), ("b", 5), ("c", 6))
    assert order_of(waiting, names) == "abcabaa"
    waiting, names = queued(*[("a", 0)] * 4, ("b", 5), ("b", 5), tokens={"a": 25.0})
    assert order_of(waiting, names) == "bbaaaa"


def test_a_share_of_two_is_twice_as_much():
    waiting, names = queued(*[("a", 0)] * 6, *[("b", 0)] * 6, share={"b": 2.0})
    assert Counter(order_of(waiting, names)[:9]) == {"b": 6, "a": 3}


def test_the_queue_is_a_merge_that_a_naive_search_finds_too():
    draw = random.Random(5)
    for _ in range(200):
        clients = [(draw.choice("abcd"), draw.randint(0, 9)) for _ in range(draw.randint(1, 12))]
        tokens = {name: draw.choice([0.0, 7.0, 30.0]) for name in "abcd"}
        waiting, _ = queued(*clients, tokens=tokens, prompt=draw.randint(1, 20))
        for state in waiting:
            state.num_admissions = draw.choice([0, 0, 1])
        used = {id(state.account): state.account.tokens for state in waiting}
        left, expected = list(waiting), []
        while left:
            heads = {id(state.account): state for state in reversed(left)}
            first = min(
                heads.values(), key=lambda state: (used[id(state.account)], state.arrival_ns, state.number)
            )
            used[id(first.account)] += 0 if first.num_admissions else first.num_prompt_tokens
            left.remove(first)
            expected.append(first)
        queue = FairQueue(waiting, 0, PRICES)
        assert list(queue) == expected
        assert (queue[0], len(queue)) == (expected[0], len(expected))


def test_requests_that_are_too_late_come_last():
    waiting, _ = queued(("a", 0), ("a", 1), ("b", 2), tokens={"b": 99.0})
    late = waiting[0]
    late.rank = float("inf")
    ordered = list(FairQueue([*waiting[1:], late], 0, PRICES))
    assert ordered[-1] is late


def test_the_service_of_the_client_that_has_used_least_steps_and_services_take_turns_among_equals():
    def service(name, tokens, last_step):
        state = make_state(name)
        state.account = Account(0, 1.0, tokens)
        return FakeService(name, running=[state], last_step=last_step)

    def first(*services):
        return Fair().decide(view_of(*services), 0).turns[0].service

    assert first(service("x", 5.0, 3), service("y", 4.0, 9)) == "y"
    assert first(service("x", 5.0, 8), service("y", 5.0, 9)) == "x"
    assert first(service("x", 5.0, 9), service("y", 5.0, 8)) == "y"


def test_a_client_that_comes_back_is_lifted_to_the_least_of_those_that_wait():
    accounts = ClientAccounts(PRICES)
    busy, idle, late = (accounts.of(client) for client in (A, B, C))
    for account in (busy, idle):
        accounts.arrived(account)
        accounts.waits(account)
    accounts.waits_no_more(idle)
    accounts.charge_prompt(busy, 100, 0)
    accounts.arrived(idle)
    assert idle.tokens == 100.0
    accounts.waits_no_more(busy)
    accounts.arrived(late)
    assert late.tokens == 100.0, "of the client that was the last to wait"
    accounts.charge_outputs([(late, 3)], 2**31)
    assert late.tokens == 100.0 + 3 * 2.0 * 2, "tokens of 2 GiB of weights cost twice as much"
    assert accounts.of(Client("b", 2.0)) is idle
    accounts.charge_prompt(idle, 10, 0)
    assert idle.tokens == 105.0


def test_prices_must_be_above_0():
    with pytest.raises(ConfigError, match="order fair: output_price must be above 0, got 0"):
        Fair(output_price=0)


def served(requests, services="a", steps: int = 600, **options):
    """Output tokens by client after ``steps`` steps, or at the end; and the priced tokens."""
    pool = make_pool(options.pop("blocks", 64), per_merged=dict.fromkeys(services, 1), alike=True)
    scheduler = make_scheduler(pool, order=Fair(), starvation_s=1e6, max_token_gap_s=1e6, **options)
    clients = {request.id: request.client.name for request in requests}
    prompts = {request.id: len(request.prompt) for request in requests}
    pending = sorted(requests, key=lambda request: request.arrival_ns)
    now_ns, outputs, priced, begun = 0, Counter(), Counter(), set()
    for _ in range(steps):
        while pending and pending[0].arrival_ns <= now_ns:
            scheduler.submit(pending.pop(0), now_ns)
        plan = scheduler.schedule(now_ns)
        if isinstance(plan, StepPlan):
            now_ns += STEP_NS
            tokens = [[7] * len(plan.sampled)] * plan.iterations
            for event in scheduler.update(plan, StepResult(tokens, [STEP_NS] * plan.iterations), now_ns):
                client = clients[event.request_id]
                if event.request_id not in begun and event.tokens:
                    begun.add(event.request_id)
                    priced[client] += prompts[event.request_id]
                outputs[client] += len(event.tokens)
                priced[client] += 2 * len(event.tokens)
        elif pending:
            now_ns = max(now_ns, pending[0].arrival_ns)
        else:
            break
    return outputs, priced


def requests_of(client, count, *, prompt, output, every=0, service="a", offset=0):
    made = [make_request(prompt, output, service=service) for _ in range(count)]
    return [
        replace(request, client=client, arrival_ns=offset + number * every)
        for number, request in enumerate(made)
    ]


@pytest.mark.parametrize(("prompt", "output"), [(8, 8), (4, 16), (24, 4)])
def test_a_flood_takes_no_more_than_half_while_another_wants_as_much(prompt, output):
    """VTC's bound: the difference is at most twice what the larger of a prompt and a full batch costs."""
    flood = requests_of(A, 1000, prompt=8, output=8)
    steady = requests_of(B, 1000, prompt=prompt, output=output, offset=50 * STEP_NS)
    _, priced = served([*flood, *steady], steps=500, max_running=8)
    begun_late = 50 * 8 * 2 + 50 * 8  # what the flood may use before the other comes
    bound = 2 * max(prompt, 2 * 8 * (prompt + output))
    assert abs(priced["a"] - priced["b"]) <= bound + begun_late


def test_a_client_with_few_requests_does_not_wait_behind_a_flood():
    flood = requests_of(A, 200, prompt=8, output=8)
    single = requests_of(B, 1, prompt=8, output=8, offset=STEP_NS)
    outputs, _ = served([*flood, *single], steps=40, max_running=4)
    assert outputs["b"] == 8
    assert outputs["a"] > 8


def test_who_is_alone_gets_everything():
    alone, _ = served(requests_of(A, 60, prompt=8, output=8), steps=200, max_running=8)
    clients = [
        request for number in range(60) for request in requests_of(Client(str(number)), 1, prompt=8, output=8)
    ]
    many, _ = served(clients, steps=200, max_running=8)
    assert sum(alone.values()) == sum(many.values())


def test_shares_hold_over_services():
    flood = [
        *requests_of(A, 1000, prompt=8, output=8),
        *requests_of(A, 1000, prompt=8, output=8, service="b"),
    ]
    steady = requests_of(B, 1000, prompt=8, output=8, service="c")
    _, priced = served([*flood, *steady], services="abc", steps=400, max_running=12, blocks=96)
    assert 0.75 < priced["a"] / priced["b"] < 1.34


def test_a_double_share_gets_twice_as_much():
    first = requests_of(Client("a", 2.0), 1000, prompt=8, output=8)
    second = requests_of(B, 1000, prompt=8, output=8)
    _, priced = served([*first, *second], steps=400, max_running=9)
    assert 1.7 < priced["a"] / priced["b"] < 2.3


def test_prompts_in_the_cache_cost_nothing():
    """Each client repeats one prompt; that of a is found from its second request on, that of b never is."""
    repeated = [replace(request, prompt=[5] * 24) for request in requests_of(A, 1000, prompt=24, output=4)]
    fresh = requests_of(B, 1000, prompt=24, output=4)
    outputs, _ = served([*repeated, *fresh], steps=300, max_running=6, blocks=128)
    assert outputs["a"] > 1.2 * outputs["b"]
