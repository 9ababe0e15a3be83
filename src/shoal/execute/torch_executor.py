"""TorchExecutor: runs plans as copies, forward passes over the paged KV pool, and sampling."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from shoal.core import NO_TOKEN, Arrival, Service, StepPlan, StepResult, StepTimings
from shoal.execute.attention.kv_buffers import BlockTransfer, KVStore
from shoal.execute.attention.kv_views import UnitIds
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.batch import build_batch
from shoal.execute.cuda_graphs import empty_cuda_cache
from shoal.execute.current_device import on_device
from shoal.execute.grammar.fork_server import GrammarModel
from shoal.execute.grammar.masks import GrammarMasks, RowMasks
from shoal.execute.grammar.pool import GrammarPool
from shoal.execute.model.loading import LoadedModel
from shoal.execute.model.model_set import ModelSet
from shoal.execute.protocol import Interrupted, StepFailed, WeightsAbsent, never
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sampling.prompt_outputs import PromptOutputRequest, PromptOutputs
from shoal.execute.sampling.sampler import Sampled, report_logprobs, sample
from shoal.execute.sequences import RunningSequence, SequenceTable
from shoal.execute.transfers import to_device
from shoal.execute.weights.image import Place
from shoal.kvcache import PoolLayout
from shoal.native import load_native

_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)


class TorchExecutor:
    """Runs plans in order; with ``depth`` 2 in a thread, so that the next plan is scheduled meanwhile.

    host_layout: layout of host memory for swapped KV; None if nothing is swapped. unit_ids, host_unit_ids:
    look up the units of a block in the split layout (methods of the pools); the merged layout needs none.
    """

    def __init__(
        self,
        models: ModelSet,
        layout: PoolLayout,
        *,
        depth: int = 1,
        unit_ids: UnitIds | None = None,
        host_layout: PoolLayout | None = None,
        host_unit_ids: UnitIds | None = None,
    ) -> None:
        self._models = models
        self._services = models.services
        self._weights = models.weights
        self.store = KVStore(layout, models.device, unit_ids, host_layout, host_unit_ids)
        self._sequences = SequenceTable()
        library = load_native() if models.device.type == "cpu" else None
        self._sampler = None if library is None else NativeSampler(library)
        self.grammars = GrammarPool(
            {name: _grammar_model(served.model) for name, served in models.services.items()}
        )
        self._masks = GrammarMasks(self.grammars)
        self._results: deque[Future[StepResult]] = deque()
        self._thread = ThreadPoolExecutor(1, "shoal-executor") if depth > 1 else None
        self._failed = False
        """A plan in flight failed, so those behind it must not run."""

    def add_service(self, service: Service, model: LoadedModel) -> None:
        """Add a service, between two plans."""
        self._models.add(service, model)
        self.grammars.add_service(service.name, _grammar_model(model))

    def remove_service(self, service: str) -> None:
        """Remove a service that has no sequences, between two plans."""
        self._models.remove(service)
        self.grammars.remove_service(service)

    def warm_up(self, max_rows: int, max_tokens: int) -> None:
        """Prepare for steps of up to ``max_rows`` rows and ``max_tokens`` tokens, before there are plans."""

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """See Executor; without a thread the plan runs here, and ``collect`` returns its result."""
        if not self._results:
            self._failed = False
        # Located here, since the pool may reassign blocks before the thread runs the plan.
        saving, copies = self.store.locate(plan.swap_out_copies), self.store.locate(plan.copies)
        if self._thread is not None:
            self._results.append(self._thread.submit(self._run, plan, saving, copies, interrupted))
            return
        done: Future[StepResult] = Future()
        try:
            done.set_result(self._run(plan, saving, copies, interrupted))
        except Exception as error:
            done.set_exception(error)
        self._results.append(done)

    def collect(self) -> StepResult:
        return self._results.popleft().result()

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        return self._masks.ready(seq_ids)

    def arrivals(self) -> Sequence[Arrival]:
        return () if self._weights is None else self._weights.arrivals()

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        return self.store.services[service].read_blocks(blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        self.store.services[service].write_blocks(blocks, content)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._results.clear()
        self.grammars.close()
        if self._weights is not None:
            self._weights.close()

    @torch.inference_mode()
    def _run(
        self,
        plan: StepPlan,
        saving: Sequence[BlockTransfer],
        copies: Sequence[BlockTransfer],
        interrupted: Interrupted,
    ) -> StepResult:
        with on_device(self.store.buffer.device):
            return self._run_here(plan, saving, copies, interrupted)

    def _run_here(
        self,
        plan: StepPlan,
        saving: Sequence[BlockTransfer],
        copies: Sequence[BlockTransfer],
        interrupted: Interrupted,
    ) -> StepResult:
        started = time.perf_counter_ns()
        self._apply(plan, saving, copies)
        return self._iterate(plan, started, interrupted)

    def _apply(
        self, plan: StepPlan, saving: Sequence[BlockTransfer], copies: Sequence[BlockTransfer]
    ) -> None:
        """Move weights, run copies, and change the batch; raises StepFailed if the plan's rows must not
        run."""
        if plan.evict or plan.fetch:
            self._move_weights(plan)
        for transfer in saving:
            transfer.run()
        for merged_block in plan.zero:
            self.store.zero(merged_block)
        for transfer in copies:
            transfer.run()
        self._masks.leave(plan.left)
        self._sequences.apply(plan)
        if self._failed:
            raise StepFailed("the step before it failed")

    def _move_weights(self, plan: StepPlan) -> None:
        if self._weights is None:
            raise RuntimeError("a plan moves weights, but all of them stay in memory")
        self._weights.evict(plan.evict)
        self._weights.fetch(plan.fetch)

    def _iterate(self, plan: StepPlan, started: int, interrupted: Interrupted) -> StepResult:
        """Run the iterations of a plan; each computes the tokens that the one before sampled."""
        rows = [self._sequences[seq_id] for seq_id in plan.seq_ids]
        if not rows:
            duration_ns = time.perf_counter_ns() - started
            return StepResult.of_step([], duration_ns, timings=StepTimings(duration_ns))
        self._require_weights(plan.service)
        results: list[StepResult] = []
        while True:
            result = self._recoverable(partial(self._compute, plan, rows, started))
            results.append(result)
            if len(results) == plan.iterations or self._ends_any(plan, rows, result.tokens[0]):
                break
            if interrupted() or (self._weights is not None and self._weights.arrived):
                break
            started += result.duration_ns
        return StepResult.of_iterations(results)

    def _require_weights(self, service: str) -> None:
        image = self._services[service].model.image
        if image is not None and image.place is not Place.RESIDENT:
            raise WeightsAbsent(f"a step of service {service!r}, whose weights are {image.place.value}")

    def _recoverable(self, compute: Callable[[], _Result]) -> _Result:
        """What ``compute`` returns; raises StepFailed for an error after which the device can go on."""
        try:
            return compute()
        except Exception as error:
            if not is_recoverable(error):
                raise
            _log.debug("a step failed", exc_info=True)
            message = f"{type(error).__name__}: {error}"
        # Outside of ``except``, so that the tensors in the traceback's frames are freed.
        self._failed = True
        self._free_memory()
        raise StepFailed(message)

    def _free_memory(self) -> None:
        """Release what a step after a failed one can do without."""
        if self.store.buffer.device.type == "cuda":
            empty_cuda_cache()

    def _compute(self, plan: StepPlan, rows: Sequence[RunningSequence], started_ns: int) -> StepResult:
        """Run one iteration, whose time counts from ``started_ns``."""
        self._masks.begin(plan.service, [(plan.seq_ids[i], rows[i]) for i in plan.sampled])
        step = self._prepare(plan, rows)
        prepared_ns = time.perf_counter_ns()
        request = PromptOutputRequest.of(plan, rows, step.last, self._sequences.computed)
        prompt_outputs = PromptOutputs()
        if request.empty:
            logits = self._forward(plan, step)
        else:
            logits, prompt_outputs = self._forward_with_prompt_outputs(plan, step, request)
        self._sequences.advance(rows, plan.new_tokens)
        forwarded_ns = time.perf_counter_ns()
        if logits.is_cuda and not self._masks.complete:
            torch.cuda.current_stream().synchronize()  # until then masks may still arrive
        sampled = self._sample(plan, rows, logits, self._masks.finish())
        if sampled.postponed:
            self._postpone(plan, rows, sampled.postponed, prompt_outputs)
        ended_ns = time.perf_counter_ns()
        return StepResult(
            [sampled.tokens],
            [ended_ns - started_ns],
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            timings=StepTimings(
                prepared_ns - started_ns, forwarded_ns - prepared_ns, ended_ns - forwarded_ns
            ),
            prompt_logprobs=prompt_outputs.logprobs,
            embeddings=prompt_outputs.embeddings,
            failures=sampled.failures,
            postponed=sampled.postponed,
        )

    def _prepare(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> "PreparedStep":
        cache, backend = self.store.services[plan.service], self._services[plan.service].backend
        batch = build_batch(self._sequences, rows, plan.new_tokens, cache)
        return PreparedStep(
            batch.last, lambda: StepArguments(batch.input_ids, batch.positions, backend(batch, cache))
        )

    def _postpone(
        self,
        plan: StepPlan,
        rows: Sequence[RunningSequence],
        postponed: Iterable[int],
        prompt_outputs: PromptOutputs,
    ) -> None:
        """Let these rows of ``plan.sampled`` compute their last token again in a later step, and sample
        then."""
        numbers = [plan.sampled[place] for place in postponed]
        self._sequences.advance([rows[number] for number in numbers], [-1] * len(numbers))
        for number in numbers:
            prompt_outputs.embeddings.pop(number, None)

    def _ends_any(self, plan: StepPlan, rows: Sequence[RunningSequence], tokens: Sequence[int]) -> bool:
        """Whether one of the rows has ended or got no token."""
        eos = self._services[plan.service].model.eos_token_ids
        pairs = zip(rows, tokens, strict=True)
        return any(token == NO_TOKEN or row.stops_at(token, eos) for row, token in pairs)

    def _forward(self, plan: StepPlan, step: "PreparedStep") -> torch.Tensor:
        """Logits [len(plan.sampled), vocab]; only rows that sample go through the output head."""
        ids, positions, attention = step.arguments()
        rows = to_device(step.last[list(plan.sampled) or [0]], ids.device)
        return self._services[plan.service].model.forward(ids, positions, rows, attention)

    def _forward_with_prompt_outputs(
        self, plan: StepPlan, step: "PreparedStep", request: PromptOutputRequest
    ) -> tuple[torch.Tensor, PromptOutputs]:
        """Logits as from ``_forward``, and prompt log-probabilities and embeddings."""
        ids, positions, attention = step.arguments()
        last = step.last[list(plan.sampled) or [0]]
        indices = to_device(request.token_indices(last), ids.device)
        model = self._services[plan.service].model
        hidden = model.forward.hidden(ids, positions, indices, attention)
        logits = model.forward.logits(hidden[: len(last)])
        report = report_logprobs if self._sampler is None else self._sampler.report
        return logits, request.compute(hidden, len(last), model.forward, model.vocab_size, report)

    def _sample(
        self,
        plan: StepPlan,
        rows: Sequence[RunningSequence],
        logits: torch.Tensor,
        masks: RowMasks | None,
    ) -> Sampled:
        if not plan.sampled:
            return Sampled([], None, {})
        chosen = [rows[i] for i in plan.sampled]
        eos = self._services[plan.service].model.eos_token_ids
        sampled = sample(logits, chosen, eos, self._sampler, masks)
        for place, (row, token) in enumerate(zip(chosen, sampled.tokens, strict=True)):
            if place in sampled.postponed:
                continue
            known = max(token, 0)  # a row without a token ends, but a step already queued needs a valid id
            row.tokens.append(known)
            if row.penalty is not None:
                row.penalty.add(known)
        return sampled


def is_recoverable(error: Exception) -> bool:
    """Whether the device can go on after an error of a forward pass.

    It cannot after an error that CUDA reports: that may come from any earlier kernel, and leaves the
    process's CUDA context unusable.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    reported = any(name in str(error) for name in ("CUDA error", "cuDNN error"))
    return not reported and not isinstance(error, torch.AcceleratorError)


def _grammar_model(model: LoadedModel) -> GrammarModel:
    return GrammarModel(model.folder, model.vocab_size, model.eos_token_ids)


class StepArguments(NamedTuple):
    """Arguments of a Forward but for the rows."""

    input_ids: torch.Tensor
    """[1, tokens]; so are the positions."""
    positions: torch.Tensor
    attention: AttentionStep


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step before its forward pass."""

    last: np.ndarray
    """Index in the batch of the last token of each row of the plan."""
    arguments: Callable[[], StepArguments]
