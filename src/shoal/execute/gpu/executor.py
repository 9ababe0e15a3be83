"""GpuExecutor: launches a plan when it is submitted, and reads its tokens when they are collected.

With two plans in flight the device computes while the host reads the tokens of the step before, updates the
scheduler, and launches the next step. So a step may begin with tokens that only the device knows.

A plan overlaps with others if its rows are sampled by their logits alone, one token each. A plan whose
sampling needs the host (penalties, grammars, log-probabilities, ...) is launched after those in flight were
read, and runs to its end as in a TorchExecutor.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from shoal.core import StepPlan, StepResult, StepTimings
from shoal.execute.attention.kv_views import UnitIds
from shoal.execute.cuda_graphs import CudaGraphCapturer, GraphCapturer
from shoal.execute.current_device import on_device
from shoal.execute.gpu.slot_steps import SlotStep, SlotSteps
from shoal.execute.model.model_set import ModelSet
from shoal.execute.protocol import Interrupted, StepFailed, never
from shoal.execute.sampling.adjust_logits import needs_adjustment
from shoal.execute.sampling.choose import INCOMPLETE, choose, choose_incomplete, may_be_incomplete
from shoal.execute.sequences import RunningSequence
from shoal.execute.torch_executor import PreparedStep, TorchExecutor
from shoal.execute.transfers import CudaQueue, Queue, Reading
from shoal.kvcache import PoolLayout

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class GpuExecutor(TorchExecutor):
    """Runs plans in order on a GPU. Arguments are those of a TorchExecutor; capturer, queue: for tests."""

    def __init__(
        self,
        models: ModelSet,
        layout: PoolLayout,
        *,
        unit_ids: UnitIds | None = None,
        host_layout: PoolLayout | None = None,
        host_unit_ids: UnitIds | None = None,
        capturer: GraphCapturer | None = None,
        queue: Queue | None = None,
    ) -> None:
        super().__init__(
            models, layout, unit_ids=unit_ids, host_layout=host_layout, host_unit_ids=host_unit_ids
        )
        self._queue: Queue = queue or CudaQueue()
        self.slot_steps = SlotSteps(
            self._services, self.store, self._sequences, capturer or CudaGraphCapturer()
        )
        self._launched: deque[_Launched] = deque()
        """Plans in flight whose tokens were not read, oldest first."""
        self._deferred: _Deferred | None = None
        """The newest plan in flight, if it is still to be computed."""

    def warm_up(self, max_rows: int, max_tokens: int) -> None:
        """Compile the kernels, and record steps, of all services.

        Without memory for that, steps are left to try it.
        """
        steps = self.slot_steps
        with torch.inference_mode(), on_device(self.store.buffer.device):
            for service in self._services:
                if not steps.take(service) or steps.recorded(service):
                    continue
                steps.fit(max_rows)
                try:
                    self._recoverable(partial(steps.compute_padding, service))
                except StepFailed as failure:
                    _log.warning("%s: a step without requests failed: %s", service, failure)
                else:
                    steps.record(service, max_rows, max_tokens)

    def remove_service(self, service: str) -> None:
        super().remove_service(service)
        self.slot_steps.forget_unused()

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """See Executor. A plan that needs the host is applied, and computed with the next plan or when it is
        collected, so that the tokens of the plan before it do not wait for it."""
        self._compute_deferred()
        if not self._results:
            self._failed = False
        future: Future[StepResult] = Future()
        self._results.append(future)
        try:
            with torch.inference_mode(), on_device(self.store.buffer.device):
                self._start(plan, interrupted, future)
        except Exception as error:
            future.set_exception(error)

    def collect(self) -> StepResult:
        future = self._results.popleft()
        while not future.done():
            if self._launched:
                self._finish_oldest()
            else:
                self._compute_deferred()
        return future.result()

    def close(self) -> None:
        self._launched.clear()
        self._deferred = None
        super().close()

    def _start(self, plan: StepPlan, interrupted: Interrupted, future: "Future[StepResult]") -> None:
        """Apply a plan, and launch it if it overlaps with others."""
        started, begun = time.perf_counter_ns(), self._queue.begin()
        saving, copies = self.store.locate(plan.swap_out_copies), self.store.locate(plan.copies)
        try:
            self._apply(plan, saving, copies)
        finally:
            self.slot_steps.note_changes()
        rows = [self._sequences[seq_id] for seq_id in plan.seq_ids]
        if rows and self._overlaps(plan, rows):
            launched = self._recoverable(partial(self._launch, plan, rows, started, begun, future))
            self._launched.append(launched)
        else:
            self._deferred = _Deferred(plan, interrupted, future, time.perf_counter_ns() - started)

    def _compute_deferred(self) -> None:
        """Compute the plan that was only applied, if there is one, after those before it."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return
        while self._launched:
            self._finish_oldest()
        try:
            if self._failed:
                raise StepFailed("the step before it failed")
            with torch.inference_mode(), on_device(self.store.buffer.device):
                # The time since it was applied was that of others.
                started = time.perf_counter_ns() - deferred.applying_ns
                deferred.future.set_result(self._iterate(deferred.plan, started, deferred.interrupted))
        except Exception as error:
            deferred.future.set_exception(error)

    def _overlaps(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> bool:
        """Whether nothing of the plan needs the tokens of those in flight, or results of its own, on the
        host."""
        if plan.iterations > 1 or not self.slot_steps.take(plan.service):
            return False
        return not any(self._scores(row) for row in rows) and not any(
            needs_adjustment(row)
            or row.sampling.grammar is not None
            or row.sampling.logprobs is not None
            or row.sampling.embed
            for row in (rows[sampled] for sampled in plan.sampled)
        )

    def _scores(self, row: RunningSequence) -> bool:
        """Whether log-probabilities of the row's next tokens are to be reported, as of its prompt."""
        if row.sampling.prompt_logprobs is None:
            return False
        return bool(self._sequences.computed[row.slot] < row.prompt_tokens)

    def _launch(
        self,
        plan: StepPlan,
        rows: Sequence[RunningSequence],
        started: int,
        begun: Any,
        future: "Future[StepResult]",
    ) -> "_Launched":
        logits = self._forward(plan, self._prepare(plan, rows))
        self._sequences.advance(rows, plan.new_tokens)
        sampled = [rows[row] for row in plan.sampled]
        slots = [row.slot for row in sampled]
        draws: list[float] = self._sequences.draws(slots).tolist()
        params = [row.sampling for row in sampled]
        tokens = logits.new_zeros(0, dtype=torch.int64)
        if sampled:
            tokens = choose(logits, params, draws)
            self.slot_steps.put_tokens(slots, tokens)
        # The next step may overwrite the logits.
        kept = logits.clone() if may_be_incomplete(params) else None
        launching_ns = time.perf_counter_ns() - started
        return _Launched(plan, sampled, draws, kept, self._queue.read(tokens, begun), launching_ns, future)

    def _finish_oldest(self) -> None:
        launched = self._launched.popleft()
        try:
            with torch.inference_mode(), on_device(self.store.buffer.device):
                result = self._finish(launched)
        except Exception as error:
            launched.future.set_exception(error)
        else:
            launched.future.set_result(result)

    def _finish(self, launched: "_Launched") -> StepResult:
        """Wait for the tokens of a launched plan."""
        if launched.error is not None:
            raise launched.error
        tokens = launched.reading.wait()
        finishing_ns = time.perf_counter_ns()
        for place, token in launched.repaired.items():
            tokens[place] = token
        late = [place for place, token in enumerate(tokens) if token == INCOMPLETE]
        if late and launched.logits is not None:
            params = [row.sampling for row in launched.rows]
            choice = partial(choose_incomplete, launched.logits, params, launched.draws, tokens)
            tokens = self._recoverable_behind(choice)
        for row, token in zip(launched.rows, tokens, strict=True):
            known = max(token, 0)  # a row without a token ends, but a step already queued needs a valid id
            row.tokens.append(known)
            if row.penalty is not None:
                row.penalty.add(known)
        if late:
            self._repair([launched.rows[place] for place in late])
        duration_ns = launched.reading.duration_ns()
        sample_ns = time.perf_counter_ns() - finishing_ns
        timings = StepTimings(launched.launching_ns, duration_ns, sample_ns)
        return StepResult([tokens], [duration_ns], timings=timings)

    def _repair(self, late: Sequence[RunningSequence]) -> None:
        """Compute the part of these rows in the plans in flight again: they began without their newest
        tokens."""
        found = {id(row) for row in late}
        behind = [
            (launched, [place for place, row in enumerate(launched.rows) if id(row) in found])
            for launched in self._launched
        ]
        for launched, places in behind:
            self._sequences.advance([launched.rows[place] for place in places], [-1] * len(places))
        try:
            for launched, places in behind:
                if places:
                    self._recoverable_behind(partial(self._compute_again, launched, places))
        except StepFailed:
            return  # nor do those behind it count

    def _recoverable_behind(self, compute: Callable[[], _Result]) -> _Result:
        """As ``_recoverable``, for what plans in flight depend on: after StepFailed none of them counts."""
        launched = list(self._launched)
        for each in launched:
            each.error = StepFailed("the step before it failed")
        try:
            found = self._recoverable(compute)
        except StepFailed:
            for plan in [each.plan for each in launched]:
                counts = dict(zip(plan.seq_ids, plan.new_tokens, strict=True))
                there = [number for number in plan.seq_ids if number in self._sequences.sequences]
                rows = [self._sequences[number] for number in there]
                self._sequences.advance(rows, [-counts[number] for number in there])
            raise
        for each in launched:
            each.error = None
        return found

    def _compute_again(self, launched: "_Launched", places: Sequence[int]) -> None:
        """Compute rows of a plan in flight again, each by one token, and choose their tokens."""
        plan, rows = launched.plan, [launched.rows[place] for place in places]
        alone = replace(
            plan,
            seq_ids=tuple([plan.seq_ids[plan.sampled[place]] for place in places]),
            new_tokens=(1,) * len(places),
            sampled=tuple(range(len(places))),
            co_batched=(),
        )
        logits = self._forward(alone, self._prepare(alone, rows))
        self._sequences.advance(rows, alone.new_tokens)
        params, draws = [row.sampling for row in rows], [launched.draws[place] for place in places]
        chosen = choose_incomplete(logits, params, draws, choose(logits, params, draws).tolist())
        self.slot_steps.put_tokens([row.slot for row in rows], torch.tensor(chosen, device=logits.device))
        launched.repaired.update(zip(places, chosen, strict=True))

    def _prepare(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> PreparedStep:
        if self.slot_steps.take(plan.service):
            return self.slot_steps.prepare(plan, rows)
        self.slot_steps.put_changes()
        return super()._prepare(plan, rows)

    def _forward(self, plan: StepPlan, step: PreparedStep) -> torch.Tensor:
        if isinstance(step, SlotStep):
            return self.slot_steps.forward(plan.service, step)
        return super()._forward(plan, step)

    def _free_memory(self) -> None:
        while self._launched:  # they may read what is freed
            self._finish_oldest()
        self.slot_steps.graphs.clear()  # their memory pool is not available to others
        super()._free_memory()


@dataclass(frozen=True, slots=True)
class _Deferred:
    """A plan that was applied, and is to be computed after those in flight."""

    plan: StepPlan
    interrupted: Interrupted
    future: "Future[StepResult]"
    applying_ns: int


@dataclass(slots=True)
class _Launched:
    """A plan that the device computes."""

    plan: StepPlan
    rows: Sequence[RunningSequence]
    """Those that sample; so are draws and logits."""
    draws: Sequence[float]
    logits: torch.Tensor | None
    """Kept if a row may be INCOMPLETE."""
    reading: Reading
    launching_ns: int
    """Time of the host."""
    future: "Future[StepResult]"
    repaired: dict[int, int] = field(default_factory=dict)
    """Tokens that were computed again, by place in ``rows``."""
    error: StepFailed | None = None
    """Why its tokens do not count."""
