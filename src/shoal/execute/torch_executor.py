"""The torch executor: plans into forward passes of `transformers` models over the paged KV pool."""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from shoal.core import NO_TOKEN, Service, StepPlan, StepResult, StepTimings, TokenLogprobs
from shoal.execute.attention.kv_buffers import KVStore, Transfer
from shoal.execute.attention.kv_views import MergedCache, UnitIds
from shoal.execute.batch import StepBatch, build_batch
from shoal.execute.cuda_graphs import CudaRecorder, Recorder
from shoal.execute.current_device import on_device
from shoal.execute.grammar.fork_server import GrammarModel
from shoal.execute.grammar.masks import GrammarMasks, RowMasks
from shoal.execute.grammar.pool import GrammarPool
from shoal.execute.model.loading import LoadedModel, ModelSet
from shoal.execute.protocol import Interrupted, StepFailed, never
from shoal.execute.sampling.native_sampler import NativeSampler
from shoal.execute.sampling.prompt_outputs import PromptOutputRequest, PromptOutputs
from shoal.execute.sampling.sampler import Sampled, report, sample
from shoal.execute.sequences import RunningSequence, SequenceTable
from shoal.kvcache import PoolLayout
from shoal.native import load_native

if TYPE_CHECKING:
    from shoal.execute.decode_graphs import DecodeBuffers, DecodeGraphs

_log = logging.getLogger(__name__)


class TorchExecutor:
    """Runs plans one after the other; with ``depth`` 2 in a thread, so that the next is scheduled meanwhile.

    host_layout: of the host memory for swapped KV; None where no plan swaps. unit_ids, host_unit_ids: where
    the split layout scattered a block (the pools' methods); the merged layout needs none.
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
        self._model_set = models
        self._backends = models.backends
        self._models = models.models
        self.store = KVStore(layout, models.device, unit_ids, host_layout, host_unit_ids)
        self._groups = SequenceTable()
        library = load_native() if models.device.type == "cpu" else None
        self._sampler = None if library is None else NativeSampler(library)
        self.grammars = GrammarPool({name: _grammar_model(model) for name, model in models.models.items()})
        """The grammars that requests may follow."""
        self._masks = GrammarMasks(self.grammars)
        self._graphs: dict[str, DecodeGraphs] = {}
        self._buffers: DecodeBuffers | None = None
        self._recorder: Recorder = CudaRecorder()
        self._results: deque[Future[StepResult]] = deque()
        self._thread = ThreadPoolExecutor(1, "shoal-executor") if depth > 1 else None
        self._failed = False
        """A plan in flight failed, and those behind it are not to run."""

    def add_service(self, service: Service, model: LoadedModel) -> None:
        """A service comes, between two plans."""
        self._model_set.add(service, model)
        self.grammars.add_service(service.name, _grammar_model(model))

    def remove_service(self, service: str) -> None:
        """A service goes of which no sequence is left, between two plans."""
        self._graphs.pop(service, None)
        self._model_set.remove(service)
        self.grammars.remove_service(service)

    def submit(self, plan: StepPlan, interrupted: Interrupted = never) -> None:
        """See Executor; without a thread the plan runs here and its result waits for ``collect``."""
        if not self._results:
            self._failed = False
        # Located here: by the time the thread gets to it, the pool may have given blocks to the next plan.
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
        """See Executor."""
        return self._results.popleft().result()

    def ready(self, seq_ids: Sequence[int]) -> Sequence[int]:
        """See Executor."""
        return self._masks.ready(seq_ids)

    def read_blocks(self, service: str, blocks: Sequence[int]) -> memoryview:
        """See Executor; waits for the device."""
        return self.store.services[service].read_blocks(blocks)

    def write_blocks(self, service: str, blocks: Sequence[int], content: memoryview) -> None:
        """See Executor."""
        self.store.services[service].write_blocks(blocks, content)

    def close(self) -> None:
        """See Executor."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._results.clear()
        self.grammars.close()

    @torch.inference_mode()
    def _run(
        self,
        plan: StepPlan,
        saving: Sequence[Transfer],
        copies: Sequence[Transfer],
        interrupted: Interrupted,
    ) -> StepResult:
        with on_device(self.store.buffer.device):
            return self._run_here(plan, saving, copies, interrupted)

    def _run_here(
        self,
        plan: StepPlan,
        saving: Sequence[Transfer],
        copies: Sequence[Transfer],
        interrupted: Interrupted,
    ) -> StepResult:
        started = time.perf_counter_ns()
        for transfer in saving:
            transfer.carry_out()
        for merged_block in plan.zero:
            self.store.zero(merged_block)
        for transfer in copies:
            transfer.carry_out()
        self._masks.leave(plan.left)
        self._groups.apply(plan)
        if self._failed:
            raise StepFailed("the step before it failed")
        rows = [self._groups[seq_id] for seq_id in plan.seq_ids]
        if not rows:
            duration_ns = time.perf_counter_ns() - started
            return StepResult.of_step([], duration_ns, timings=StepTimings(duration_ns))
        return self._iterate(plan, rows, started, interrupted)

    def _iterate(
        self, plan: StepPlan, rows: Sequence[RunningSequence], started: int, interrupted: Interrupted
    ) -> StepResult:
        """The iterations of a plan, each of which computes the tokens that the one before has sampled."""
        ends_ns = [started]
        tokens: list[list[int]] = []
        logprobs: list[list[TokenLogprobs | None] | None] = []
        prepare_ns = forward_ns = sample_ns = 0
        told: PromptOutputs | None = None
        while True:
            made = self._run_recoverable(plan, rows)
            told = told or made.told  # later iterations compute no prompt
            prepare_ns += made.prepared_ns - ends_ns[-1]
            forward_ns += made.forwarded_ns - made.prepared_ns
            sample_ns += made.ended_ns - made.forwarded_ns
            ends_ns.append(made.ended_ns)
            sampled = made.sampled
            tokens.append(sampled.tokens)
            logprobs.append(sampled.logprobs)
            if len(tokens) == plan.iterations or self._ends_any(plan, rows, sampled.tokens) or interrupted():
                break
        durations_ns = [end_ns - start_ns for start_ns, end_ns in pairwise(ends_ns)]
        timings = StepTimings(prepare_ns, forward_ns, sample_ns)
        return StepResult(
            tokens,
            durations_ns,
            logprobs=_complete(logprobs, len(plan.sampled)),
            timings=timings,
            failures=sampled.failures,
            postponed=sampled.postponed,
            prompt_logprobs=told.logprobs,
            embeddings=told.embeddings,
        )

    def _run_recoverable(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> "_Iteration":
        """One iteration; raises StepFailed for an error after which the device can go on."""
        try:
            return self._compute(plan, rows)
        except Exception as error:
            if not is_survivable(error):
                raise
            _log.debug("a step failed", exc_info=True)
            message = f"{type(error).__name__}: {error}"
        # Here the error is gone, and with it the tensors of the frames in its traceback.
        self._failed = True
        if self.store.buffer.device.type == "cuda":
            self._graphs.clear()  # whose memory nothing else can have
            self._buffers = None
            torch.cuda.empty_cache()
        raise StepFailed(message)

    def _compute(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> "_Iteration":
        self._masks.begin(plan.service, [(plan.seq_ids[i], rows[i]) for i in plan.sampled])
        batch = build_batch(self._groups, rows, plan.new_tokens, self.store.services[plan.service])
        prepared_ns = time.perf_counter_ns()
        asked = PromptOutputRequest.of(plan, rows, batch.last, self._groups.computed)
        told = PromptOutputs()
        if asked.nothing:
            logits = self._forward(plan, batch)
        else:
            logits, told = self._forward_for_prompts(plan, batch, asked)
        self._groups.advance(rows, plan.new_tokens)
        forwarded_ns = time.perf_counter_ns()
        if logits.is_cuda and not self._masks.complete:
            torch.cuda.current_stream().synchronize()  # masks have the time of the forward pass
        sampled = self._sample(plan, rows, logits, self._masks.finish())
        if sampled.postponed:
            self._postpone(plan, rows, sampled.postponed, told)
        return _Iteration(sampled, prepared_ns, forwarded_ns, time.perf_counter_ns(), told)

    def _postpone(
        self, plan: StepPlan, rows: Sequence[RunningSequence], postponed: Iterable[int], told: PromptOutputs
    ) -> None:
        """Rows of ``plan.sampled`` compute their last token once more, and then get what follows it."""
        numbers = [plan.sampled[place] for place in postponed]
        self._groups.advance([rows[number] for number in numbers], [-1] * len(numbers))
        for number in numbers:
            told.embeddings.pop(number, None)

    def _ends_any(self, plan: StepPlan, rows: Sequence[RunningSequence], tokens: Sequence[int]) -> bool:
        """Whether one of the rows, all of which were to get a token, has come to its end."""
        eos = self._models[plan.service].eos_token_ids
        pairs = zip(rows, tokens, strict=True)
        return any(token == NO_TOKEN or row.ends_with(token, eos) for row, token in pairs)

    def _forward(self, plan: StepPlan, batch: StepBatch) -> torch.Tensor:
        """Logits [len(plan.sampled), vocab]; only the rows that sample go through the output head."""
        last = batch.last[list(plan.sampled) or [0]]
        rows = torch.from_numpy(last).to(batch.input_ids.device)
        cache, backend = self.store.services[plan.service], self._backends[plan.service]
        all_decode = batch.num_decodes == len(batch.firsts)
        if all_decode and backend.records_decodes and isinstance(cache, MergedCache):
            logits = self._graphs_of(plan.service, cache).run(batch)
            if logits is not None:
                return logits[rows]
        step = backend(batch, cache)
        return self._models[plan.service].forward(batch.input_ids, batch.positions, rows, step)

    def _graphs_of(self, service: str, cache: MergedCache) -> "DecodeGraphs":
        """The recorded decodes of a service, as the pool is laid out now."""
        # Importing it needs triton, which CPU builds of torch come without.
        from shoal.execute.decode_graphs import DecodeBuffers, DecodeGraphs

        if self._buffers is None:
            self._buffers = DecodeBuffers(cache.device)
        graphs = self._graphs.get(service)
        if graphs is None or graphs.cache is not cache:
            # Rows of other services on the model may be longer than this service allows.
            model = self._models[service]
            graphs = self._graphs[service] = DecodeGraphs(
                model.forward, cache, model.context_tokens, self._buffers, self._recorder
            )
        return graphs

    def _forward_for_prompts(
        self, plan: StepPlan, batch: StepBatch, asked: PromptOutputRequest
    ) -> tuple[torch.Tensor, PromptOutputs]:
        """The same where something is asked of prompts, and what is told of them."""
        step = self._backends[plan.service](batch, self.store.services[plan.service])
        last = batch.last[list(plan.sampled) or [0]]
        places = torch.from_numpy(asked.places(last)).to(batch.input_ids.device)
        model = self._models[plan.service]
        hidden = model.forward.hidden(batch.input_ids, batch.positions, places, step)
        logits = model.forward.logits(hidden[: len(last)])
        told = report if self._sampler is None else self._sampler.report
        return logits, asked.answer(hidden, len(last), model.forward, model.vocab_size, told)

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
        eos = self._models[plan.service].eos_token_ids
        sampled = sample(logits, chosen, eos, self._sampler, masks)
        for place, (row, token) in enumerate(zip(chosen, sampled.tokens, strict=True)):
            if place in sampled.postponed:
                continue
            known = max(token, 0)  # a row without a token ends; a step already queued must not stumble
            row.tokens.append(known)
            if row.penalty is not None:
                row.penalty.add(known)
        return sampled


def is_survivable(error: Exception) -> bool:
    """Whether the device can go on after an error of a forward pass: not after one that CUDA itself reports.

    Such an error may come from any kernel before, and leaves the process's CUDA context unusable.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    reported = any(name in str(error) for name in ("CUDA error", "cuDNN error"))
    return not reported and not isinstance(error, torch.AcceleratorError)


def _grammar_model(model: LoadedModel) -> GrammarModel:
    return GrammarModel(model.folder, model.vocab_size, model.eos_token_ids)


@dataclass(frozen=True, slots=True)
class _Iteration:
    """What one iteration made, and when its parts ended."""

    sampled: Sampled
    prepared_ns: int
    forwarded_ns: int
    ended_ns: int
    told: PromptOutputs


def _complete(
    logprobs: Sequence[Sequence[TokenLogprobs | None] | None], sampled: int
) -> list[Sequence[TokenLogprobs | None]] | None:
    """Of all iterations, with None for each row of those that have none; None where none has any."""
    if all(row is None for row in logprobs):
        return None
    return [[None] * sampled if row is None else row for row in logprobs]
