"""LengthLimits: the check of a request's prompt and output lengths, by clients and by the engine."""

from dataclasses import dataclass

from shoal.core.errors import InvalidRequest
from shoal.core.request import ResumeState
from shoal.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Limits on the length of one service's requests."""

    service: str
    context_tokens: int
    """Context length of the service."""
    max_total_tokens: int
    """Maximum length of a request, prompt and output: less than the context if the KV pool is small."""

    def check(
        self,
        prompt_tokens: int,
        sampling: SamplingParams,
        output_tokens: int = 0,
        resumed: ResumeState | None = None,
    ) -> int:
        """The number of output tokens for which there is room after the prompt.

        output_tokens: its earlier output.

        Raises:
            InvalidRequest: the request can never be served.
        """
        if not prompt_tokens:
            raise InvalidRequest("the prompt is empty; it must have at least one token", param="prompt")
        self.check_prompt(prompt_tokens)
        room = self.max_total_tokens - prompt_tokens
        if resumed is not None and resumed.max_new_tokens > room:
            raise InvalidRequest(
                f"the request was promised up to {resumed.max_new_tokens} output tokens, but {self}; "
                f"with this prompt of {prompt_tokens} it can have at most {room} here",
                param="max_tokens",
                code="context_length_exceeded",
            )
        self._check_requested(prompt_tokens, sampling, room)
        most = resolve_max_new_tokens(sampling, resumed, room)
        if output_tokens > most:
            raise InvalidRequest(
                f"output_tokens has {output_tokens} tokens, but the request can have at most {most}",
                param="output_tokens",
            )
        return room

    def check_prompt(self, tokens: int, *, at_least: bool = False) -> None:
        """Raise InvalidRequest for a prompt that leaves no room for output.

        at_least: ``tokens`` is only a lower bound of the prompt's length.
        """
        most = self.max_total_tokens - 1
        if tokens > most:
            raise InvalidRequest(
                f"the prompt has {'at least ' if at_least else ''}{tokens} tokens, "
                f"but {self}; shorten the prompt to at most {most} tokens",
                param="prompt",
                code="context_length_exceeded",
            )

    def _check_requested(self, prompt: int, sampling: SamplingParams, room: int) -> None:
        requested = sampling.max_tokens if sampling.max_tokens is not None else max(1, sampling.min_tokens)
        if requested <= room:
            return
        name = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
        raise InvalidRequest(
            f"the prompt has {prompt} tokens and {name} asks for {requested}, {prompt + requested} together, "
            f"but {self}; ask for at most {room} tokens or shorten the prompt",
            param=name,
            code="context_length_exceeded",
        )

    def __str__(self) -> str:
        reason = "its context length"
        if self.max_total_tokens < self.context_tokens:
            reason = "all that the KV memory can hold; give kv_cache.memory more for longer requests"
        return f"{self.service} takes {self.max_total_tokens} tokens of prompt and output together ({reason})"


def resolve_max_new_tokens(sampling: SamplingParams, resumed: ResumeState | None, room: int) -> int:
    """Limit on the output tokens of a request; room: output tokens for which there is room."""
    if resumed is not None:
        return resumed.max_new_tokens
    return room if sampling.max_tokens is None else sampling.max_tokens
