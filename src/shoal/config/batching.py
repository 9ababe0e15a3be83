"""Reads how batches are formed; what is not written comes from the scheduler's preset."""

from dataclasses import dataclass, replace
from typing import Any

from shoal.batches import FORMERS
from shoal.cluster.batching_options import BatchingOptions
from shoal.config.presets import Preset
from shoal.config.sections import Section, section_of
from shoal.config.setting_tree import Node
from shoal.config.value_kinds import Choice, Kind, Maybe, OrWord, integer, seconds
from shoal.forecast import PREDICTORS


@dataclass(frozen=True, slots=True)
class BatchingSection(Section):
    """Reads the written fields, to which ``with_preset`` adds those of the preset."""

    def read(self, node: Node, path: str) -> dict[str, Any]:
        """The written values, by field name."""
        return self.read_fields(node, path)


def batching_section(*, offline: bool = False) -> Kind:
    """The keys of batching; offline: including predictors that need known output lengths."""
    lengths = tuple(name for name in PREDICTORS if offline or name != "oracle")
    rules: dict[tuple[type, str], Any] = {
        (BatchingOptions, "former"): Choice(tuple(FORMERS)),
        (BatchingOptions, "interval_s"): OrWord(seconds(above=0), None, "when-idle"),
        (BatchingOptions, "slice_tokens"): Maybe(integer(1)),
        (BatchingOptions, "max_batch"): Maybe(integer(1)),
        (BatchingOptions, "lengths"): Choice(lengths),
    }
    keys = section_of(BatchingOptions, rules, {"slice_tokens": "slice"}).keys
    return Maybe(BatchingSection(BatchingOptions, keys))


def with_preset(fields: dict[str, Any], preset: Preset) -> dict[str, Any]:
    """Fields of a section that has ``dispatch`` and ``batching``, completed by the preset.

    fields: as written; its ``batching``, if any, are fields of ``BatchingOptions``, or None. Raises
    ConfigError for options that do not go together.
    """
    merged: dict[str, Any] = {"dispatch": preset.dispatch} if preset.dispatch is not None else {}
    merged |= {"batching": preset.batching, **fields}
    written = fields.get("batching")
    if written is not None:
        merged["batching"] = replace(preset.batching or BatchingOptions(), **written)
    return merged
