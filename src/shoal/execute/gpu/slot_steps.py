"""SlotSteps: forward passes over block tables that stay on the GPU, by slot, with or without a graph."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shoal.core import StepPlan
from shoal.execute.attention.kv_buffers import KVStore
from shoal.execute.attention.kv_views import MergedCache
from shoal.execute.cuda_graphs import GraphCapturer
from shoal.execute.gpu.batch import SlotState, StepNumbers, StepShape, padding_words, table_words, to_words
from shoal.execute.gpu.graphs import GraphBuffers, StepGraphs, compute, graph_shape
from shoal.execute.gpu.step import DeviceStep
from shoal.execute.model.model_set import ServedModel
from shoal.execute.sequences import RunningSequence, SequenceTable
from shoal.execute.torch_executor import PreparedStep, StepArguments
from shoal.execute.transfers import to_device


@dataclass(frozen=True, slots=True)
class SlotStep(PreparedStep):
    """A step over the block tables of the slots."""

    words: torch.Tensor
    """``StepNumbers.words`` of the shape, on the device."""
    shape: StepShape
    recorded: bool
    """Whether there may be a graph of the shape."""
    sampled: int
    """Number of tokens whose logits are computed, without padding."""


class SlotSteps:
    """Prepares and runs the steps of services that read the block tables of the slots.

    services, store, sequences: of the executor, which changes them.
    """

    def __init__(
        self,
        services: Mapping[str, ServedModel],
        store: KVStore,
        sequences: SequenceTable,
        capturer: GraphCapturer,
    ) -> None:
        self._services = services
        self._store = store
        self._sequences = sequences
        self._capturer = capturer
        self._device = store.buffer.device
        self._state = SlotState(self._device)
        self._changes: list[tuple[int, int, Sequence[int]]] = []
        """Changes of block tables that the device does not have yet."""
        self._buffers = GraphBuffers(self._device)
        self.graphs: dict[int, StepGraphs] = {}
        """By the identity of the forward, which its graphs refer to."""

    def take(self, service: str) -> bool:
        """Whether the steps of a service are run here."""
        cache = self._store.services[service]
        return issubclass(self._services[service].backend, DeviceStep) and isinstance(cache, MergedCache)

    def note_changes(self) -> None:
        """The last plan has changed the block tables."""
        if any(self.take(service) for service in self._services):
            self._changes += self._sequences.changed

    def put_changes(self) -> None:
        """Send changes without a step; those that need them may not come for long."""
        if self._changes:
            self.fit()
            self._send(np.zeros(0, dtype=np.int32))

    def put_tokens(self, slots: Sequence[int], tokens: torch.Tensor) -> None:
        """Set the newest tokens of sequences, int64 [slots]."""
        at = to_device(np.array(slots, dtype=np.int64), self._device)
        self._state.next_ids[at] = tokens.clamp(min=0)

    def prepare(self, plan: StepPlan, rows: Sequence[RunningSequence]) -> SlotStep:
        """A step before its forward pass; all its numbers are on the device."""
        self.fit()
        numbers = StepNumbers.of(self._sequences, rows, plan.new_tokens, plan.sampled)
        shape = graph_shape(numbers.shape)
        recorded = shape is not None and self._graphs_of(plan.service).takes(shape)
        if shape is None or not recorded:
            shape = numbers.shape
        words = self._send(numbers.words(shape))
        cache = self._store.services[plan.service]

        def arguments() -> StepArguments:
            ids, _, inputs = self._state.inputs(words, shape)
            return StepArguments(ids[None], inputs.positions[None], DeviceStep(inputs, cache))

        return SlotStep(numbers.last, arguments, words, shape, recorded, len(numbers.sampled))

    def forward(self, service: str, step: SlotStep) -> torch.Tensor:
        """Logits [step.sampled, vocab]; those of a graph are valid until the next step."""
        logits = self._graphs_of(service).run(step.words, step.shape) if step.recorded else None
        if logits is None:
            logits = self._compute(service, step.words, step.shape)
        return logits[: step.sampled]

    def _compute(self, service: str, words: torch.Tensor, shape: StepShape) -> torch.Tensor:
        """Logits [shape.sampled, vocab] without a graph."""
        forward, cache = self._services[service].model.forward, self._store.services[service]
        return compute(forward, words, shape, self._state, cache)

    def compute_padding(self, service: str) -> None:
        """Run a step of a prompt and a decode that have no sequences; so kernels are compiled."""
        shape = StepShape(tokens=3, decodes=1, sampled=2, prompts=1)
        words = padding_words(shape)
        words[shape.parts[-1]] = -1, 1, 2, 0
        self._compute(service, to_device(words, self._device), shape)

    def record(self, service: str, max_rows: int, max_tokens: int) -> None:
        """Record the steps of a service with up to so many rows and tokens."""
        self._graphs_of(service).record(max_rows, max_tokens)

    def recorded(self, service: str) -> bool:
        """Whether there are graphs of the service's model."""
        return id(self._services[service].model.forward) in self.graphs

    def forget_unused(self) -> None:
        """Drop the graphs of models that no service has."""
        used = {id(served.model.forward) for served in self._services.values()}
        self.graphs = {key: graphs for key, graphs in self.graphs.items() if key in used}

    def _send(self, numbers: np.ndarray) -> torch.Tensor:
        """Bring the tables of the slots up to date; returns ``numbers`` on the device, from the same copy."""
        changes = table_words(self._changes, self._state.tables.shape[1])
        words, entries = to_words(numbers, changes, self._device)
        if len(entries):
            self._state.put_tables(entries)
        self._changes.clear()
        return words

    def _graphs_of(self, service: str) -> StepGraphs:
        """The graphs of a service's model, for the present layout of the pool."""
        forward, cache = self._services[service].model.forward, self._store.services[service]
        graphs = self.graphs.get(id(forward))
        if graphs is None or graphs.view != cache.view:
            graphs = self.graphs[id(forward)] = StepGraphs(
                forward, cache, self._state, self._buffers, self._capturer
            )
        return graphs

    def fit(self, rows: int = 0) -> None:
        """Make room for all slots, at least ``rows``, and then for the longest sequence of any service, too.

        Without ``rows`` nothing is done where the tables are large enough for those of the host.
        """
        if not rows and self._state.fits(*self._sequences.tables.shape):
            return  # as in nearly every step
        blocks = 1
        for service, served in self._services.items():
            cache = self._store.services[service]
            blocks = max(blocks, min(-(-served.context_tokens // cache.block_size), len(cache.rows)))
        slots = max(rows, len(self._sequences.tables))
        if not self._state.fits(slots, blocks):
            self._state.grow(slots, blocks)
            self.graphs.clear()
