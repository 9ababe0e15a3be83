"""Lengths of real services from public traces: outputs over time (else synthetic ones), ShareGPT-o1."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from shoal.core import ConfigError
from shoal.workload import LENGTHS, load_trace

IntArray = npt.NDArray[np.int64]

FOLDER_VARIABLE = "SHOAL_TRACES"
_NEARBY = ("traces", "../traces", "../shared/traces")

TRACES: Mapping[str, str] = {
    "Azure conversation": "azure_llm_2023/AzureLLMInferenceTrace_conv.csv",
    "Azure code": "azure_llm_2023/AzureLLMInferenceTrace_code.csv",
    "Mooncake conversation": "mooncake/conversation_trace.jsonl",
    "ServeGen DeepSeek-R1": "servegen/deepseek_r1",
    "BurstGPT": "burstgpt/BurstGPT_1.csv",
}
"""Paths of the traces in their folder."""

SHAREGPT_O1 = "sharegpt_o1/ShareGPT-o1.json"
"""From the artefact of Past-Future's authors (github.com/WuSiYu/lightllm-ae)."""

SYNTHETIC: Mapping[str, str] = {
    "synthetic, steady": "azure-conversation",
    "synthetic, changing": "varying",
}
"""Length distributions used if there is no trace at all."""
_SYNTHETIC_REQUESTS = 20_000
_MOST_REQUESTS = 50_000


@dataclass(frozen=True, slots=True)
class Outputs:
    """Output lengths of one service, in order of arrival."""

    name: str
    """Of the trace."""
    lengths: IntArray


def traces_folder() -> Path | None:
    """The folder of traces: that of ``SHOAL_TRACES``, or one nearby; None if there is none.

    Raises ConfigError if the variable names no folder.
    """
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        if not Path(named).is_dir():
            raise ConfigError(f"{FOLDER_VARIABLE} is {named!r}, which is no folder of traces")
        return Path(named)
    return next((Path(place) for place in _NEARBY if Path(place).is_dir()), None)


def outputs_over_time(folder: Path | None, most: int = _MOST_REQUESTS) -> tuple[list[Outputs], list[str]]:
    """The lengths in the traces of ``folder``, at most ``most`` of each, and notes on missing traces."""
    found, missing = [], []
    for name, place in TRACES.items():
        if folder is None or not (folder / place).exists():
            missing.append(name)
        elif name == "BurstGPT":
            found += _burstgpt(folder / place, most)
        else:
            rows = load_trace(folder / place, limit=most).rows
            found.append(Outputs(name, np.array([row.output_tokens for row in rows], dtype=np.int64)))
    notes = []
    if missing:
        where = "no folder of traces" if folder is None else f"not in {folder}"
        notes.append(
            f"Skipped, {where}: {', '.join(missing)}. {FOLDER_VARIABLE} names the folder; they lie in it as "
            + ", ".join(TRACES[name] for name in missing)
            + "."
        )
    if not found:
        notes.append("Synthetic lengths stand in for traces.")
        for name, lengths in SYNTHETIC.items():
            count = min(most, _SYNTHETIC_REQUESTS)
            found.append(Outputs(name, LENGTHS[lengths].sample(count, 0)[1]))
    return found, notes


def sharegpt_o1(folder: Path | None) -> list[tuple[int, int]] | str:
    """Prompt and output tokens of the requests of ShareGPT-o1, in order; a note if it is not there."""
    path = None if folder is None else folder / SHAREGPT_O1
    if path is None or not path.exists():
        where = "no folder of traces" if folder is None else f"not in {folder}"
        return f"Skipped, {where}: ShareGPT-o1. {FOLDER_VARIABLE} names the folder, with {SHAREGPT_O1} in it."
    requests = json.loads(path.read_text())
    return [(request["prompt_tokens"], request["completion_tokens"]) for request in requests]


def _burstgpt(path: Path, most: int) -> list[Outputs]:
    """Conversations and API calls separately, as in the paper."""
    rows = load_trace(path, limit=most).rows
    kinds = {"BurstGPT conversation": "Conversation", "BurstGPT API": "API"}
    return [
        Outputs(
            name, np.array([row.output_tokens for row in rows if kind in (row.client or "")], dtype=np.int64)
        )
        for name, kind in kinds.items()
    ]
