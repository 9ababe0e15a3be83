"""The demo's prompts, and the latency goals of its requests."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from shoal.core import SLO, resolve_slo

CHAT, COMPLETE = "chat", "complete"


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    service: str
    text: str
    max_tokens: int
    chat: bool
    """Send it to /v1/chat/completions, not to /v1/completions."""


_QUESTIONS = (
    "Explain in three sentences why the sky is blue.",
    "What is the difference between a list and a tuple in Python?",
    "Write a short poem about a lighthouse in winter.",
    "Give me a simple recipe for pancakes.",
    "Name five animals that live in the sea and say one thing about each.",
    "How does a bicycle stay upright?",
    "I have a job interview tomorrow. What should I prepare?",
    "Summarise the story of Romeo and Juliet for a child.",
    "What causes the seasons on Earth?",
    "Suggest three names for a small bakery and explain each.",
    "Why do cats purr?",
    "Explain what a hash table is to somebody who has never programmed.",
)
_BEGINNINGS = (
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest,",
    "The three most important inventions of the nineteenth century were",
    "Water boils at one hundred degrees Celsius because",
    "Dear Sir or Madam, I am writing to you about",
    "def fibonacci(n):\n    ",
    "The recipe begins with two onions, which you should",
    "In the year 2150, the first city on Mars",
    "A good teacher is somebody who",
    "The quick brown fox jumps over the lazy dog. This sentence is famous because",
    "The main difference between whales and fish is that",
    "She opened the old letter with trembling hands and read:",
)


def typical_prompts(prompts: Sequence[DemoPrompt]) -> list[DemoPrompt]:
    """One prompt of each service, with ``max_tokens`` closest to the mean of the service."""
    typical = []
    for service in dict.fromkeys(prompt.service for prompt in prompts):
        candidates = [prompt for prompt in prompts if prompt.service == service]
        mean = fmean(prompt.max_tokens for prompt in candidates)
        typical.append(min(candidates, key=lambda prompt: abs(prompt.max_tokens - mean)))
    return typical


def demo_prompts(count: int, max_tokens: int = 96, chat_share: float = 0.5) -> list[DemoPrompt]:
    """``count`` prompts of about ``max_tokens``; a share of ``chat_share``, evenly mixed in, are chats."""
    prompts = []
    chats = 0
    for index in range(count):
        chat = math.ceil((index + 1) * chat_share) > chats
        texts = _QUESTIONS if chat else _BEGINNINGS
        text = texts[(chats if chat else index - chats) % len(texts)]
        limit = max(1, max_tokens * (2 + index % 5) // 4)
        prompts.append(DemoPrompt(CHAT if chat else COMPLETE, text, limit, chat=chat))
        chats += chat
    return prompts


# A multiple of the time that a typical request takes alone: goals in seconds would depend on the machine.
_GOALS = dict.fromkeys((CHAT, COMPLETE), SLO(e2e_scale=8))


def demo_goals(alone_s: Mapping[str, float]) -> dict[str, SLO]:
    """Goals in seconds, by service; only for the services in ``alone_s``.

    alone_s: time of a typical request alone, by service.
    """
    return {name: resolve_slo(SLO(), _GOALS[name], execution_s) for name, execution_s in alone_s.items()}


def format_goals(slo: SLO) -> str:
    """Such as ``TTFT 10 s, E2E 20.5 s``."""
    goals = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("MTPOT", slo.mtpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{name} {goal:.3g} s" for name, goal in goals if goal is not None)
