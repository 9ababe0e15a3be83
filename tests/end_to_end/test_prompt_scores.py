"""Log-probabilities of prompts and embeddings equal those of `transformers`, whatever else happens."""

import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from end_to_end_builders import (
    OVERCOMMIT,
    Outcome,
    greedy_reference,
    make_request,
    run_batch,
    run_engine,
)
from execute_builders import KINDS, make_model, make_prompt, tiny_config
from references import assert_greedy, reference_pass
from served import run_served

from at_hand import DEVICE, bundled_model
from shoal.cluster.router.router import Router
from shoal.core import Request, SamplingParams, Service, TokenLogprobs
from shoal.engine import Engine, EngineOptions
from shoal.engine.build import assemble_engine
from shoal.execute.model.model_set import load_models
from shoal.frontend.offline_batch import OfflineBatch
from shoal.kvcache import KVCacheOptions
from shoal.models import Tokenizer
from shoal.schedule import SchedulerOptions

LENGTHS = (1, 9, 23, 40)
OUTPUT = 16
TOP = 3

SMALL = {"preset": "vllm", "memory_bytes": 120 << 10, "block_size": 4, **OVERCOMMIT}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "roomy": {},
    "preemptions, chunks of 13": {**SMALL, "max_batched_tokens": 13},
    "preemptions, no prefix caching": {**SMALL, "prefix_caching": False},
    "preemptions, depth 2, split, chunks of 13": {
        **SMALL, "depth": 2, "layout": "split", "max_batched_tokens": 13
    },
    "preemptions, swap, chunks of 11": {
        **SMALL, "preemption_mode": "swap", "swap_bytes": 1 << 20, "max_batched_tokens": 11
    },
    "several iterations": {"max_iterations": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: make_model(root / kind, tiny_config(kind)) for kind in KINDS}


def prompts() -> list[list[int]]:
    """Of several lengths; two share a beginning, and two are equal."""
    made = [make_prompt(length, seed=length) for length in LENGTHS]
    return [*made, made[-1][:32] + make_prompt(8, seed=99), made[-1]]


def requests(service: str, suffix: str = "") -> list[Request]:
    """All want log-probabilities but each third one, which wants an embedding instead."""
    return [
        make_request(
            f"{service}-{i}{suffix}",
            service,
            prompt,
            OUTPUT,
            **({"embed": True} if i % 3 == 2 else {"prompt_logprobs": i % (TOP + 1)}),
        )
        for i, prompt in enumerate(prompts())
    ]


def assert_scores(entries: Sequence[TokenLogprobs], folder: Path, prompt: Sequence[int], top: int) -> None:
    """They are of every token but the first, each once, with the likeliest tokens."""
    expected, _ = reference_pass(folder, tuple(prompt))
    assert [entry.token for entry in entries] == list(prompt[1:])
    for entry, logprobs in zip(entries, expected, strict=False):
        assert entry.logprob == pytest.approx(logprobs[entry.token].item(), abs=1e-3)
        assert entry.rank == 1 + int((logprobs > logprobs[entry.token]).sum())
        values, ids = logprobs.topk(top)
        assert [token for token, _ in entry.top] == ids.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(values.tolist(), abs=1e-3)


def assert_embedding(vector: bytes, folder: Path, prompt: Sequence[int]) -> None:
    """It is the last token's hidden state, of length 1."""
    _, hidden = reference_pass(folder, tuple(prompt))
    ours = torch.frombuffer(bytearray(vector), dtype=torch.float32)
    torch.testing.assert_close(ours, hidden[-1] / hidden[-1].norm(), atol=1e-4, rtol=1e-3)


def assert_equal_to_reference(outcome: Outcome, service: str, folder: Path, suffix: str = "") -> None:
    for i, prompt in enumerate(prompts()):
        name = f"{service}-{i}{suffix}"
        assert_greedy(folder, prompt, outcome.tokens[name], OUTPUT)
        if i % 3 == 2:
            (vector,) = outcome.embeddings[name]
            assert_embedding(vector, folder, prompt)
            assert name not in outcome.prompt_logprobs
        else:
            assert_scores(outcome.prompt_logprobs.get(name, ()), folder, prompt, i % (TOP + 1))
            assert name not in outcome.embeddings


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(kind: str, folders: dict[str, Path]) -> None:
    outcome = run_engine({kind: folders[kind]}, [requests(kind)], block_size=4, max_batched_tokens=29)
    assert_equal_to_reference(outcome, kind, folders[kind])


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_all_circumstances(circumstance: str, folders: dict[str, Path]) -> None:
    both = {name: folders[name] for name in ("llama", "gemma2")}
    rounds = [[one for pair in zip(*map(requests, both), strict=True) for one in pair]]
    rounds.append([request for name in both for request in requests(name, "-again")])
    settings = CIRCUMSTANCES[circumstance]
    outcome = run_engine(both, rounds, **settings)
    for name, folder in both.items():
        for suffix in ("", "-again"):
            assert_equal_to_reference(outcome, name, folder, suffix)
    assert (outcome.preemptions > 0) == ("preemptions" in circumstance)
    assert (outcome.swapped_tokens > 0) == ("swap" in circumstance)
    # By those that want an embedding.
    assert (outcome.cached_tokens > 0) == settings.get("prefix_caching", True)


def test_services_that_decode_together(folders: dict[str, Path]) -> None:
    both = {"one": folders["llama"], "other": folders["llama"]}
    rounds = [[request for name in both for request in requests(name)]]
    outcome = run_engine(both, rounds, max_batched_tokens=30)
    for name, folder in both.items():
        assert_equal_to_reference(outcome, name, folder)


def tiny_engine(folders: dict[str, Path], **scheduler: Any) -> Engine:
    """An engine of the Llama alone, on models that several engines can share."""
    services = (Service(name="llama", model="llama", dtype="float32"),)
    models = load_models(services, folders, device=DEVICE, threads=1, attention="auto", progress=None)
    kv_cache = KVCacheOptions(memory_bytes=1 << 20, block_size=4)
    options = EngineOptions(services=services, kv_cache=kv_cache, scheduler=SchedulerOptions(**scheduler))
    return assemble_engine(options, models, threads=1)[0]


def test_a_request_that_goes_on_elsewhere_is_told_no_score_twice(folders: dict[str, Path]) -> None:
    first, second = (tiny_engine(folders, max_batched_tokens=9) for _ in range(2))
    prompt = make_prompt(40)
    first.submit(make_request("r", "llama", prompt, 3, prompt_logprobs=TOP))
    told = [entry for _ in range(2) for event in first.step() for entry in event.prompt_logprobs or ()]
    assert 0 < len(told) < 39
    moved = first.detach("r")
    assert moved is not None
    second.submit(moved)
    while second.busy:
        told += [entry for event in second.step() for entry in event.prompt_logprobs or ()]
    assert_scores(told, folders["llama"], prompt, TOP)


class Letters:
    """A letter for each token."""

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


def test_a_batch_has_the_scores_of_each_prompt_once(folders: dict[str, Path]) -> None:
    engine = tiny_engine(folders)
    batch = OfflineBatch(engine)
    sampling = SamplingParams(max_tokens=2, n=3, prompt_logprobs=TOP, embed=True)
    prompt = make_prompt(23)
    batch.add("scored", "llama", prompt, sampling, Letters())
    batch.add("plain", "llama", prompt, SamplingParams(max_tokens=2), Letters())
    scored, plain = run_batch(engine, batch)
    assert scored.prompt_logprobs is not None
    assert scored.prompt_logprobs[0] is None
    assert_scores([one for one in scored.prompt_logprobs if one], folders["llama"], prompt, TOP)
    for completion in scored.outputs:
        assert completion.embedding is not None
        assert_embedding(struct.pack("<48f", *completion.embedding), folders["llama"], prompt)
    assert plain.prompt_logprobs is None
    assert plain.outputs[0].embedding is None


@pytest.mark.parametrize("prompt", [make_prompt(40), make_prompt(2)], ids=["long", "short"])
def test_prefixes_are_shared_under_the_same_salt_only(prompt: list[int], folders: dict[str, Path]) -> None:
    salts = ("a", "b", None, "a")
    rounds = []
    for i, salt in enumerate(salts):
        own = replace(make_request(f"{i}", "llama", prompt, OUTPUT), cache_salt=salt)
        # What it has said is part of this one's prompt.
        answer = greedy_reference(folders["llama"], prompt, OUTPUT)
        longer = replace(make_request(f"{i}-longer", "llama", [*prompt, *answer], 1), cache_salt=salt)
        rounds += [[own], [longer]] if i < 3 else [[longer]]
    outcome = run_engine({"llama": folders["llama"]}, rounds, block_size=4)
    # The last token of an output is not computed. Each longer one finds its salt's blocks, the last all.
    known = (len(prompt) + OUTPUT - 1) // 4 * 4
    longest = len(prompt) + OUTPUT
    assert outcome.cached_tokens == 3 * known + min(longest - 1, longest // 4 * 4)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return bundled_model("smollm2")


TEXT = "In the year 1969, the first people landed on the moon. Their names were"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_model(smollm2: Path) -> None:
    folder = smollm2
    prompt = Tokenizer.from_folder(folder).encode(TEXT)
    scored = make_request("scored", "smollm2", prompt, 2, prompt_logprobs=TOP)
    embedded = make_request("embedded", "smollm2", prompt, 1, embed=True)
    outcome = run_engine({"smollm2": folder}, [[scored, embedded]], memory_bytes=64 << 20)
    assert_scores(outcome.prompt_logprobs["scored"], folder, prompt, TOP)
    assert_embedding(outcome.embeddings["embedded"][0], folder, prompt)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_real_model_over_http(smollm2: Path) -> None:
    """As lm_eval asks it, and with everything at once."""
    services = (Service(name="smollm2", model="smollm2", dtype="float32"),)
    tokenizer = Tokenizer.from_folder(smollm2)
    options = EngineOptions(services=services, kv_cache=KVCacheOptions(memory_bytes=64 << 20))
    tokens = [tokenizer.encode(TEXT), tokenizer.encode(TEXT[:-9])]

    async def scenario(client: httpx.AsyncClient, router: Router) -> None:
        asked = {"model": "smollm2", "temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
        for _ in range(2):  # the second time the prefix cache has them
            answer = await client.post("/v1/completions", json={**asked, "prompt": tokens, "n": 2})
            choices = answer.json()["choices"]
            for choice in choices:
                prompt = tokens[choice["index"] // 2]
                expected, _ = reference_pass(smollm2, tuple(prompt))
                told = choice["logprobs"]["token_logprobs"]
                assert len(told) == len(prompt) + 1
                wanted = [expected[at, token].item() for at, token in enumerate(prompt[1:])]
                assert told[1:-1] == pytest.approx(wanted, abs=1e-3)
                assert told[-1] == pytest.approx(expected[-1].max().item(), abs=1e-3)
                assert choice["text"].startswith(tokenizer.decode(prompt))
            vectors = await client.post("/v1/embeddings", json={"model": "smollm2", "input": tokens})
            for entry, prompt in zip(vectors.json()["data"], tokens, strict=True):
                assert_embedding(struct.pack("<576f", *entry["embedding"]), smollm2, prompt)

    run_served(options, {"smollm2": smollm2}, {"smollm2": tokenizer}, scenario)
