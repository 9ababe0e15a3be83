"""Calls for the requests of a workload: texts of about as many tokens as their prompts."""

import random
from collections.abc import Sequence

from shoal.bench.target import Call
from shoal.core import SLO, Request, SyntheticPrompt, derive_seed

_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one you were her all she there would their we him been has when who will more no if out so said
what up its about into than them can only other new some could time these two may then do first any my
now such like our over man me even most made after also did many before must through back years where
much your way well down should because each just those people how too little state good very make world
still own see men work long get here between both life being under never day same another know while last
might us great old year off come since against go came right used take three
"""
WORDS = _WORDS.split()
"""Common words: one token each, with the blank before it, in the vocabularies of most models."""


def make_calls(requests: Sequence[Request], seed: int, slo: SLO, block_size: int) -> list[Call]:
    """A call for each request of a workload.

    Equal blocks of prompts, which a trace says, have equal words, so that the server's prefix cache finds
    them. block_size: tokens of such a block.
    """
    return [
        Call(
            id=request.id,
            service=request.service,
            text=_text(request, seed, block_size),
            output_tokens=_output_tokens(request),
            arrival_ns=request.arrival_ns,
            slo=slo,
        )
        for request in requests
    ]


def _output_tokens(request: Request) -> int:
    limits = [request.true_output_tokens, request.sampling.max_tokens]
    return max(1, min([limit for limit in limits if limit is not None], default=16))


def _text(request: Request, seed: int, block_size: int) -> str:
    prompt = request.prompt
    hashes = prompt.block_hashes if isinstance(prompt, SyntheticPrompt) else ()
    words: list[str] = []
    for block in hashes:
        words += random.Random(f"{seed} {block}").choices(WORDS, k=block_size)
    own = random.Random(derive_seed(seed, request.seed))
    words += own.choices(WORDS, k=max(0, len(prompt) - len(words)))
    return " ".join(words[: max(1, len(prompt))])
