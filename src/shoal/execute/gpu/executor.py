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
from typing import TypeVar

import numpy as np
import torch

from shoal.core import StepPlan, StepResult, StepTimings, uniform
from shoal.execute.attention.kv_buffers import BlockTransfer
from shoal.execute.attention.kv_views import MergedCache, UnitIds
from shoal.execute.cuda_graphs import CudaGraphCapturer, GraphCapturer
from shoal.execute.current_device import on_device
from shoal.execute.gpu.batch import SlotState, StepNumbers, table_words, to_words
from shoal.execute.gpu.graphs import DecodeGraphs, GraphBuffers, graph_size
from shoal.execute.gpu.step import DeviceStep, PromptRows, StepInputs
from shoal.execute.model.loading import ModelSet
from shoal.execute.protocol import Interrupted, StepFailed, never
from shoal.execute.sampling.adjust_logits import needs_adjustment
from shoal.execute.sampling.choose import INCOMPLETE, choose, choose_incomplete, may_be_incomplete
from shoal.execute.sequences import RunningSequence
from shoal.execute.torch_executor import PreparedStep, StepArguments, TorchExecutor
from shoal.execute.transfers import CudaQueue, Queue, Reading, to_device
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
        device = models.device
        self._capturer: GraphCapturer = capturer or CudaGraphCapturer()
        self._queue: Queue = queue or CudaQueue()
        self._slots = SlotState(device)
        self._table_changes: list[tuple[int, int, Sequence[int]]] = []
        """Changes of block tables that the device does not have yet."""
        self._buffers = GraphBuffers(device)
        self._graphs: dict[int, DecodeGraphs] = {}
        """By the identity of the forward, which its graphs refer to."""
        self._launched: deque[_Launched] = deque()
        """Plans in flight whose tokens were not read, oldest first."""

    def warm_up(self, max_rows: int) -> None:
        """Compile the kernels, and record decode steps, of all services.

        Without memory for that, steps are left to try it.
        """
        with torch.inference_mode(), on_device(self.store.buffer.device):
            for service, served in self._services.items():
                if self._reads_slots(service) and id(served.model.forward) not in self._graphs:
                    self._fit_slots(max_rows)
                    try:
                        self._recoverable(partial(self._compute_padding, service))
                    except StepFailed as failure:
                        _log.warning("%s: a step without requests failed: %s", service, failure)
                    else:
                        self._graphs_of(service).record(max_rows)

    def _compute_padding(self, service: str) -> None:
        """Run a step of a prompt and a decode that have no sequences."""
        device, model = self.store.buffer.device, self._services[service].model
        rows = torch.full((3,), -1, dtype=torch.int32, device=device)
        positions = torch.tensor([0, 0, 1], device=device)
        prompts = PromptRows(np.array([1, 3]), np.array([0]), np.array([-1]))
        inputs = StepInputs(positions, rows, torch.zeros_like(rows[:1]), self._slots.tables, prompts)
        attention = DeviceStep(inputs, self.store.services[service])
        model.forward(torch.zeros_like(positions)[None], positions[None], positions, attention)

    def remove_service(self, service: str) -> None:
        forward = self._services[service].model.forward
        super().remove_service(service)
        if not any(other.forward is forward for other in self._models.models):
            self._graphs.pop(id(forward), None)

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        if not self._results:
            self._failed = False
        saving, copies = self.store.locate(plan.swap_out_copies), self.store.locate(plan.copies)
        future: Future[StepResult] = Future()
        self._results.append(future)
        try:
            with torch.inference_mode(), on_device(self.store.buffer.device):
                result = self._start(plan, saving, copies, interrupted, future)
        except Exception as error:
            future.set_exception(error)
            return
        if result is not None:
            future.set_result(result)

    def collect(self) -> StepResult:
        future = self._results.popleft()
        while not future.done():
            self._finish_oldest()
        return future.result()

    def close(self) -> None:
        self._launched.clear()
        super().close()

    def _start(
        self,
        plan: StepPlan,
        saving: Sequence[BlockTransfer],
        copies: Sequence[BlockTransfer],
        interrupted: Interrupted,
        future: "Future[StepResult]",
    ) -> StepResult | None:
        """Launch a plan; returns its result if it is there already."""
        started = time.perf_counter_ns()
        try:
            self._apply(plan, saving, copies)
        finally:
            if any(map(self._reads_slots, self._models)):
                self._table_changes += self._sequences.changed
        rows = [self._sequences[seq_id] for seq_id in plan.seq_ids]
        if rows and self._overlaps(plan, rows):
            self._launched.append(self._recoverable(partial(self._launch, plan, rows, started, future)))
            return None
        if self._launched:
            while self._launched:
                self._finish_oldest()
            if self._failed:
                raise StepFailed("the step before it failed")
            started = time.perf_counter_ns()  # the time until now was theirs
        return self._iterate(plan, started, interrupted)

    def _overlaps(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> bool:
        """Whether nothing of the plan needs the tokens of those in flight, or results of its own, on the
        host."""
        if plan.iterations > 1 or not self._reads_slots(plan.service):
            return False
        sampling = [rows[row] for row in plan.sampled]
        return not any(row.sampling.prompt_logprobs is not None for row in rows) and not any(
            needs_adjustment(row)
            or row.sampling.grammar is not None
            or row.sampling.logprobs is not None
            or row.sampling.embed
            for row in sampling
        )

    def _reads_slots(self, service: str) -> bool:
        """Whether the service's steps read the block tables of the slots."""
        cache = self.store.services[service]
        return issubclass(self._services[service].backend, DeviceStep) and isinstance(cache, MergedCache)

    def _launch(
        self, plan: StepPlan, rows: Sequence[RunningSequence], started: int, future: "Future[StepResult]"
    ) -> "_Launched":
        begun = self._queue.begin()
        step = self._prepare(plan, rows)
        logits = self._forward(plan, step)
        self._sequences.advance(rows, plan.new_tokens)
        sampled = [rows[row] for row in plan.sampled]
        params = [row.sampling for row in sampled]
        slots = [row.slot for row in sampled]
        computed = self._sequences.computed[slots].tolist()
        draws = [
            0.0 if row.sampling.greedy else uniform(row.seed, known - row.prompt_tokens)
            for row, known in zip(sampled, computed, strict=True)
        ]
        if not sampled:
            tokens = torch.zeros(0, dtype=torch.int64, device=logits.device)
        else:
            tokens = choose(logits, params, draws)
            at = to_device(np.array(slots, dtype=np.int64), logits.device)
            self._slots.next_ids[at] = tokens.clamp(min=0)
        kept = None
        if may_be_incomplete(params):
            kept = logits.clone()  # the next step may overwrite them
        launched_ns = time.perf_counter_ns() - started
        return _Launched(plan, sampled, draws, kept, self._queue.read(tokens, begun), launched_ns, future)

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
        late = [place for place, token in enumerate(tokens) if token == INCOMPLETE]
        if late and launched.logits is not None:
            params = [row.sampling for row in launched.rows]
            choice = partial(choose_incomplete, launched.logits, params, launched.draws, tokens)
            tokens = self._recoverable_behind(choice)
        for place, token in launched.repaired.items():
            tokens[place] = token
        for row, token in zip(launched.rows, tokens, strict=True):
            known = max(token, 0)  # a row without a token ends, but a step already queued needs a valid id
            row.tokens.append(known)
            if row.penalty is not None:
                row.penalty.add(known)
        for place in late:
            if place not in launched.repaired:
                self._repair(launched.rows[place])
        duration_ns = launched.reading.duration_ns()
        sample_ns = time.perf_counter_ns() - finishing_ns
        timings = StepTimings(launched.launched_ns, duration_ns, sample_ns)
        return StepResult([tokens], [duration_ns], timings=timings)

    def _repair(self, row: RunningSequence) -> None:
        """Compute the row's part of the plans in flight again: they began with a token that was none."""
        behind = [each for each in self._launched if any(other is row for other in each.rows)]
        self._sequences.computed[row.slot] -= len(behind)
        try:
            for each in behind:
                self._recoverable_behind(partial(self._compute_again, each, row))
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

    def _compute_again(self, launched: "_Launched", row: RunningSequence) -> None:
        place = next(place for place, other in enumerate(launched.rows) if other is row)
        plan = launched.plan
        number = plan.seq_ids[plan.sampled[place]]
        alone = replace(plan, seq_ids=(number,), new_tokens=(1,), sampled=(0,), co_batched=())
        logits = self._forward(alone, self._prepare(alone, [row]))
        self._sequences.advance([row], [1])
        params, draws = [row.sampling], [launched.draws[place]]
        [token] = choose_incomplete(logits, params, draws, choose(logits, params, draws).tolist())
        self._slots.next_ids[row.slot] = max(token, 0)
        launched.repaired[place] = token

    def _prepare(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> PreparedStep:
        if not self._reads_slots(plan.service):
            if self._table_changes:  # a plan that needs them may not come for long
                self._fit_slots()
                self._put_tables(np.zeros(0, dtype=np.int32))
            return super()._prepare(plan, rows)
        self._fit_slots()
        numbers = StepNumbers.of(self._sequences, rows, plan.new_tokens)
        size = graph_size(len(rows)) if numbers.decodes == len(rows) else None
        if size is not None and not self._graphs_of(plan.service).takes(size):
            size = None
        words = self._put_tables(numbers.words(size))
        cache = self.store.services[plan.service]

        def arguments() -> StepArguments:
            ids, inputs = numbers.inputs(words, size, self._slots)
            return StepArguments(ids[None], inputs.positions[None], DeviceStep(inputs, cache))

        return _SlotStep(numbers.last, arguments, words, size)

    def _put_tables(self, numbers: np.ndarray) -> torch.Tensor:
        """Bring the tables of the slots up to date; returns ``numbers`` on the device, from the same copy."""
        changes = table_words(self._table_changes, self._slots.tables.shape[1])
        words, entries = to_words(numbers, changes, self.store.buffer.device)
        if len(entries):
            self._slots.put_tables(entries)
        self._table_changes.clear()
        return words

    def _forward(self, plan: StepPlan, step: PreparedStep) -> torch.Tensor:
        if isinstance(step, _SlotStep) and step.size is not None:
            logits = self._graphs_of(plan.service).run(step.words, step.size)
            if logits is not None:
                rows = len(step.last)
                sampled = list(plan.sampled) or [0]
                if len(sampled) == rows:
                    return logits[:rows]
                return logits[to_device(np.array(sampled), logits.device)]
        return super()._forward(plan, step)

    def _graphs_of(self, service: str) -> DecodeGraphs:
        """The graphs of a service's model, for the present layout of the pool."""
        forward, cache = self._services[service].model.forward, self.store.services[service]
        graphs = self._graphs.get(id(forward))
        if graphs is None or graphs.view != cache.view:
            graphs = self._graphs[id(forward)] = DecodeGraphs(
                forward, cache, self._slots, self._buffers, self._capturer
            )
        return graphs

    def _fit_slots(self, rows: int = 0) -> None:
        """Make room for all slots, at least ``rows``, and for the longest sequence of any service."""
        longest = max(served.context_tokens for served in self._services.values())
        block_size = next(iter(self.store.services.values())).block_size
        slots, blocks = max(rows, len(self._sequences.tables)), -(-longest // block_size)
        if not self._slots.fits(slots, blocks):
            self._slots.grow(slots, blocks)
            self._graphs.clear()

    def _free_memory(self) -> None:
        while self._launched:  # they may read what is freed
            self._finish_oldest()
        self._graphs.clear()  # their memory pool is not available to others
        super()._free_memory()


@dataclass(frozen=True, slots=True)
class _SlotStep(PreparedStep):
    """A step over the block tables of the slots."""

    words: torch.Tensor
    """``StepNumbers.words`` on the device."""
    size: int | None
    """Rows of the graph for it; None if it runs without."""


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
    launched_ns: int
    """Time of the host for launching it."""
    future: "Future[StepResult]"
    repaired: dict[int, int] = field(default_factory=dict)
    """Tokens that were computed again, by place in ``rows``."""
    error: StepFailed | None = None
    """Why its tokens do not count."""
