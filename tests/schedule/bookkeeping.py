"""Expected rows of running batches, computed from plans, results and events alone."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from replay_executor import ReplayExecutor

from shoal.core import StepPlan, StepResult
from shoal.schedule import Scheduler

_COLUMNS = (
    *("num_prompt_tokens", "num_generated", "num_tokens_with_in_flight", "num_scheduled", "num_computed"),
    *("num_published", "num_blocks", "in_flight", "prefilling", "is_ending", "predicted_tokens"),
    "postponed",
    *("service_time_ns", "last_scheduled_ns", "first_token_ns", "last_token_ns", "largest_gap_ns"),
)


class Bookkeeping:
    """Tracks every running request, and compares the scheduler's rows with its own counts."""

    def __init__(self, scheduler: Scheduler, executor: ReplayExecutor) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._request_ids: dict[int, str] = {}
        self._in_flight: list[StepPlan] = []
        self._service_time_ns = Counter[str]()
        self._last_scheduled_ns: dict[str, int] = {}
        self._postponed: set[int] = set()
        self._token_times_ns = defaultdict[str, list[int]](list)

    def planned(self, plan: StepPlan) -> None:
        """The executor has run a new plan; the update is still to come."""
        for state in self._scheduler.services.values():
            for request in state.running.requests:
                self._request_ids[request.seq_id] = request.request.id
        self._in_flight.append(plan)

    def updated(
        self, plan: StepPlan, result: StepResult, now_ns: int, tokens: Mapping[str, Sequence[int]]
    ) -> None:
        """The update was made; tokens: of every request so far."""
        assert self._in_flight.pop(0) is plan
        ends_ns = [now_ns - sum(result.durations_ns[at + 1 :]) for at in range(len(result.durations_ns))]
        for seq_id in plan.seq_ids:
            request_id = self._request_ids[seq_id]
            self._service_time_ns[request_id] += result.duration_ns
            self._last_scheduled_ns[request_id] = now_ns
            times_ns = self._token_times_ns[request_id]
            new = len(tokens.get(request_id, ())) - len(times_ns)
            times_ns += ends_ns[:new] if len(ends_ns) > 1 else ends_ns * new
        for place, row in enumerate(plan.sampled):
            if place in result.postponed:
                self._postponed.add(plan.seq_ids[row])
            else:
                self._postponed.discard(plan.seq_ids[row])

    def ready(self, seq_ids: Iterable[int]) -> None:
        """These sequences are no longer postponed."""
        self._postponed.difference_update(seq_ids)

    def abandoned(self) -> None:
        """All plans in flight were rolled back."""
        self._in_flight.clear()

    def compare(self, tokens: Mapping[str, Sequence[int]]) -> None:
        """Check all rows of all batches; tokens: of each request's events so far."""
        for name, state in self._scheduler.services.items():
            batch = state.running
            assert batch.seq_id.tolist() == [request.seq_id for request in batch.requests]
            assert sorted(set(batch.seq_id.tolist())) == batch.seq_id.tolist()
            columns = {name: getattr(batch, name).tolist() for name in _COLUMNS}
            for row, request in enumerate(batch.requests):
                known_output = tokens.get(request.request.id, ())
                expected = self._row(request.seq_id, request.request.id, known_output)
                actual = {name: columns[name][row] for name in expected}
                assert actual == expected, (actual, expected)
                assert request.service == name
                assert request.block_ids == self._executor.sequences[request.seq_id].table
                assert columns["is_ending"][row] == (request.ending is not None)
                # The copy of a cached last block counts as published before its last token is computed.
                full_blocks = (columns["num_computed"][row] + 1) // self._executor.pool.block_size
                assert columns["num_published"][row] <= full_blocks
                assert columns["predicted_tokens"][row] > columns["num_generated"][row]
            for request in state.waiting:
                assert request.seq_id == -1
                assert not request.block_ids
                assert request.num_generated == len(tokens.get(request.request.id, ()))

    def _row(self, seq_id: int, request_id: str, known_output: Sequence[int]) -> dict[str, int]:
        sequence = self._executor.sequences[seq_id]
        known = len(sequence.tokens)
        own = [plan for plan in self._in_flight if seq_id in plan.seq_ids]
        unsettled = sum(_computed(plan, seq_id) for plan in own)
        sampling = sum(plan.iterations for plan in own if plan.seq_ids.index(seq_id) in plan.sampled)
        times_ns = self._token_times_ns[request_id]
        row = {
            "num_tokens_with_in_flight": known,
            "num_prompt_tokens": known - sampling - len(known_output),
            "num_generated": len(known_output),
            "num_scheduled": sequence.computed,
            "num_computed": sequence.computed - unsettled,
            "num_blocks": len(sequence.table),
            "in_flight": len(own),
            "postponed": int(seq_id in self._postponed),
            "prefilling": int(sequence.computed < sequence.joined_tokens),
            "service_time_ns": self._service_time_ns[request_id],
            "first_token_ns": times_ns[0] if times_ns else 0,
            "last_token_ns": times_ns[-1] if times_ns else 0,
            "largest_gap_ns": _largest_gap(times_ns),
        }
        if request_id in self._last_scheduled_ns:
            row["last_scheduled_ns"] = self._last_scheduled_ns[request_id]
        return row


def _computed(plan: StepPlan, seq_id: int) -> int:
    return plan.new_tokens[plan.seq_ids.index(seq_id)] + plan.iterations - 1


def _largest_gap(times_ns: Iterable[int]) -> int:
    return max((after - before for before, after in pairwise(times_ns)), default=0)
