"""Optional parts of a response: echoed prompt, token ids, log-probabilities of the prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from shoal.core import TokenLogprobs
from shoal.serve.openai.response_bodies import PromptLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseExtras:
    """Optional parts of a response. Choice ``c`` of prompt ``p`` has the index ``p * n + c``."""

    prompts: Sequence[Sequence[int]]
    """Token ids of each prompt."""
    n: int
    echoed: Callable[[int], str] | None = None
    """The text of a prompt, by its number, with which its outputs begin; None: prompts are not echoed."""
    returns_token_ids: bool = False
    format_prompt: Callable[[Sequence[TokenLogprobs]], PromptLogprobs] | None = None
    """Formats log-probabilities of prompts; None: they are not returned."""

    def prompt(self, index: int) -> Sequence[int]:
        """Token ids of the prompt of choice ``index``."""
        return self.prompts[index // self.n]

    def first_choice(self, index: int) -> int:
        """Index of the first choice of the same prompt, which alone has the prompt's log-probabilities."""
        return index - index % self.n

    def echo(self, index: int) -> str:
        """The prompt's text with which choice ``index`` begins; "": prompts are not echoed."""
        return "" if self.echoed is None else self.echoed(index // self.n)

    def prompt_token_ids(self, index: int) -> list[int] | UnsetType:
        """The field ``prompt_token_ids`` of choice ``index``."""
        return list(self.prompt(index)) if self.returns_token_ids else UNSET

    def token_ids(self, tokens: Sequence[int]) -> list[int] | UnsetType:
        """The field ``token_ids`` of an output or chunk."""
        return list(tokens) if self.returns_token_ids else UNSET

    def prompt_logprobs(self, entries: Sequence[TokenLogprobs]) -> PromptLogprobs | UnsetType:
        """The field ``prompt_logprobs`` of a choice or response."""
        return UNSET if self.format_prompt is None else self.format_prompt(entries)
