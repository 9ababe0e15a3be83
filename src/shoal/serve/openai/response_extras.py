"""What a response shows beside the text of its outputs: echoed prompts, token ids, scores of prompts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from shoal.core import TokenLogprobs
from shoal.serve.openai.response_bodies import PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseExtras:
    """Of a request with ``n`` choices of every prompt; choice ``c`` of prompt ``p`` is at ``p * n + c``."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    n: int
    """Choices of each."""
    echoed: Callable[[int], str] | None = None
    """Text of a prompt by its number, which its outputs begin with; None: they do not."""
    returns_token_ids: bool = False
    """Token ids are shown."""
    format_prompt: Callable[[Sequence[TokenLogprobs]], PromptLogprobs] | None = None
    """Log-probabilities of prompts are shown, in this shape."""

    def prompt(self, index: int) -> Sequence[int]:
        """Token ids of the prompt of choice ``index``."""
        return self.prompts[index // self.n]

    def first_of(self, index: int) -> int:
        """The first choice of the same prompt, which alone has log-probabilities of it."""
        return index - index % self.n

    def echo(self, index: int) -> str:
        """What the text of choice ``index`` begins with."""
        return "" if self.echoed is None else self.echoed(index // self.n)

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        """The field of choice ``index``, or of the response."""
        return list(self.prompt(index)) if self.returns_token_ids else UNSET

    def token_ids(self, tokens: Sequence[int]) -> list[int] | UnsetType:
        """The field of an output, or of a piece of it."""
        return list(tokens) if self.returns_token_ids else UNSET

    def prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs | UnsetType:
        """The field of a choice, or of the response."""
        return UNSET if self.format_prompt is None else self.format_prompt(entries)
