"""FusedForward: runs a model whose layers are all fused, without the code of `transformers` around them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shoal.execute.attention.native_backend import NativeAttention
from shoal.execute.attention.transformers_hook import AttentionStep
from shoal.execute.model.decoder_layer import DecoderLayer
from shoal.execute.model.native_layer import NativeLayer
from shoal.execute.model.recognise_layers import RecognisedLayer, RotaryTable


class FusedForward:
    """A Forward with the same bits as that of `transformers` with the same layers.

    layers: with their rotary tables; all must have the same ``eps``. norm, head: follow the layers.
    """

    def __init__(
        self,
        embed: nn.Module,
        layers: Sequence[tuple[DecoderLayer, RotaryTable]],
        norm: nn.Module,
        head: nn.Module,
    ) -> None:
        self._embed, self._norm, self._head = embed, norm, head
        self._layers = [layer for layer, _ in layers]
        self._tables = list(dict.fromkeys(table for _, table in layers))
        self._table_of = [self._tables.index(table) for _, table in layers]
        self._next_scale = [layer.before_attention for layer in self._layers[1:]] + [None]
        native = [NativeLayer.from_layer(layer) for layer in self._layers]
        self.native_layers = [layer for layer in native if layer is not None]
        """Used by steps with native attention if they are all layers. Otherwise layers are computed one
        operation at a time, with the same bits."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        return self.logits(self.hidden(input_ids, positions, rows, step))

    def hidden(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        embedded = self._embed(input_ids)
        x = embedded[0].contiguous()
        first = self._layers[0]
        tables = [table.compute(embedded, positions) for table in self._tables]
        angles = [(first.angles(cos), first.angles(sin)) for cos, sin in tables]
        normed = first.kernels.norm(x, first.before_attention, first.eps)
        # The last layer computes only these rows, as most tokens of a prompt sample nothing.
        fewer = len(rows) < len(x)
        done = 0
        if len(self.native_layers) == len(self._layers) and isinstance(step, NativeAttention):
            done = len(self._layers) - (1 if fewer else 0)
            by_layer = [angles[table] for table in self._table_of]
            step.run_layers(self.native_layers[:done], x, normed, by_layer[:done], self._next_scale[:done])
        for i in range(done, len(self._layers)):
            layer, (cos, sin) = self._layers[i], angles[self._table_of[i]]
            last = i == len(self._layers) - 1
            x, mlp_output = layer.compute(x, normed, cos, sin, step, rows if last and fewer else None)
            x, normed = layer.kernels.residual_norm(
                mlp_output, layer.after_mlp, x, self._next_scale[i], layer.eps
            )
        return self._last_norm(x if fewer else x[rows])

    def _last_norm(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._norm(x)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits


def fused_forward(model: Any, layers: Sequence[RecognisedLayer]) -> FusedForward | None:
    """A FusedForward of ``model``; None if a layer is not fused or the model is built differently.

    The caller must check that the code around the layers does nothing else.
    """
    found = [(layer.place.module, layer.rotary) for layer in layers]
    fused = [(part, table) for part, table in found if isinstance(part, DecoderLayer) and table is not None]
    norm = getattr(model.base_model, "norm", None)
    if len(fused) != model.config.get_text_config().num_hidden_layers or not isinstance(norm, nn.Module):
        return None
    if len({layer.eps for layer, _ in fused}) != 1:
        return None
    return FusedForward(model.get_input_embeddings(), fused, norm, model.get_output_embeddings())
