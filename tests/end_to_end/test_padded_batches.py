"""Static batches, sliced or not, say what `transformers` says to each prompt alone: greedy float32."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from end_to_end_builders import greedy_reference, greedy_references
from execute_builders import make_model, make_prompt, tiny_config
from references import assert_greedy

from at_hand import bundled_model
from experiments.padded import offline, torch_executor
from experiments.padded.calibrate import calibrate
from experiments.padded.engine import StaticEngine
from experiments.padded.offline import StaticSetup, StaticShoal
from experiments.padded.torch_executor import StaticBatchExecutor, StaticModel, load_static_model
from shoal.batches import MemoryByBytes
from shoal.core import (
    ConfigError,
    FinishReason,
    InvalidRequest,
    Request,
    SamplingParams,
    Service,
)
from shoal.engine.info import EngineInfo, ServiceInfo
from shoal.forecast.latency import LatencyModel
from shoal.forecast.latency_padded import Bilinear, PaddedLatency
from shoal.forecast.latency_profile import LatencyProfile, save_profile
from shoal.models import Tokenizer

LADDER = ("sls", "so", "pm", "ab", "lb", "scls")
OUTPUT = 14
PROMPTS = [make_prompt(length, seed=length) for length in (1, 3, 9, 9, 16, 30, 41)]
LIMITS = [14, 2, 5, 14, 9, 11, 14]
TIME = PaddedLatency(
    prefill=Bilinear(product=1e-5, sequence=1e-4, length=1e-5, constant=1e-3),
    decode=Bilinear(product=1e-6, sequence=1e-4, length=1e-6, constant=1e-3),
)


class NoText:
    def decode(self, tokens: object, skip_special_tokens: bool = True) -> str:
        return ""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("static") / "llama", tiny_config("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> StaticModel:
    return load_static_model(Service(name="tiny", model="tiny", dtype="float32"), folder)


@pytest.mark.parametrize("preset", LADDER)
def test_every_step_of_the_ladder_says_what_transformers_says(
    preset: str, folder: Path, model: StaticModel
) -> None:
    end = greedy_reference(folder, PROMPTS[6], OUTPUT)[7]  # at least one ends in the middle of a slice
    limits = ServiceInfo(
        model="tiny", context_tokens=256, max_total_tokens=256, kv_tokens=256, vocab_size=model.vocab_size,
        eos_token_ids=(end,),
    )  # fmt: skip
    info = EngineInfo(
        services={"tiny": limits}, device="cpu", threads=1, block_size=1, merged_blocks=1, kv_bytes=1,
        weight_bytes=1,
    )  # fmt: skip
    interval_s = None if preset in ("sls", "so") else 0.001
    engine = StaticEngine(
        Service(name="tiny", model="tiny"),
        StaticSetup(
            preset=preset,
            slice_tokens=None if preset == "sls" else 3,
            max_batch=3 if preset in ("sls", "so", "pm") else None,
            interval_s=interval_s,
        ).options(),
        lambda: StaticBatchExecutor(model, threads=1),
        info,
        workers=2,
        time=TIME,
        memory=MemoryByBytes(token_bytes=1, available_bytes=300),
    )
    requests = [
        Request(
            id=str(number),
            service="tiny",
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=LIMITS[number]),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    outcome = engine.run(requests, NoText(), progress=False)
    for number, answer in enumerate(outcome.completions):
        assert_greedy(folder, PROMPTS[number], answer.tokens, LIMITS[number], end)
        ended = answer.tokens[-1] == end
        assert answer.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert (max(outcome.report.slices) > 1) == (preset != "sls")


class ByteTokens:
    """A tokenizer of bytes that fits the tiny model's vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [3 + byte % 190 for byte in text.encode()]

    def apply_chat_template(self, messages: list[dict[str, str]]) -> list[int]:
        return [7, *self.encode(messages[0]["content"]), 8]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + token % 26) for token in tokens)


@pytest.mark.parametrize("chat", [False, True])
def test_the_offline_interface_loads_calibrates_and_answers(
    chat: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "resolve_service", lambda service, progress: Path(service.model))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda *_: ByteTokens())
    shoal = StaticShoal(
        Service(name="tiny", model=str(folder), dtype="float32", max_model_len=64),
        StaticSetup(slice_tokens=4, interval_s=0.001, kv_bytes=1 << 20),
        progress=False,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    texts = ["one", "a longer prompt", "two"]
    outcome = shoal.generate(texts, sampling, chat=chat, arrivals_s=[0.0, 0.02, 0.01], progress=False)
    for text, answer in zip(texts, outcome.completions, strict=True):
        prompt = [7, *ByteTokens().encode(text), 8] if chat else ByteTokens().encode(text)
        assert_greedy(folder, prompt, answer.tokens, 10)
        assert answer.text == ByteTokens().decode(answer.tokens)
    assert outcome.report.slices == {3: 3}
    again = shoal.generate([[5, 6, 7]], sampling, progress=False)
    assert_greedy(folder, [5, 6, 7], again.completions[0].tokens, 10)
    with pytest.raises(InvalidRequest, match="its context length"):
        shoal.generate([[5] * 60], sampling, progress=False)


def test_serving_times_may_come_from_a_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(offline, "resolve_service", lambda service, progress: Path(service.model))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda *_: ByteTokens())
    linear = LatencyModel(constant_s=1.0, sequence_s=0.0, token_s=0.0, context_s=0.0, work_s=0.0)
    profile = LatencyProfile(
        device="cpu", threads=1, models={("tiny", 1): linear}, padded={("tiny", 1): TIME}
    )
    save_profile(profile, tmp_path / "profile.json")
    setup = StaticSetup(profile=tmp_path / "profile.json")
    shoal = StaticShoal(Service(name="tiny", model=str(folder), dtype="float32"), setup, progress=False)
    assert shoal._engine._time == TIME
    with pytest.raises(ConfigError, match="no latency profile of other"):
        StaticShoal(Service(name="other", model=str(folder)), setup, progress=False)


def test_too_little_memory_for_any_request_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "resolve_service", lambda service, progress: Path(service.model))
    monkeypatch.setattr(Tokenizer, "from_folder", lambda *_: ByteTokens())
    service = Service(name="tiny", model=str(folder), dtype="float32")
    with pytest.raises(ConfigError, match=r"hold no request at all: a token of .* takes 384"):
        StaticShoal(service, StaticSetup(kv_bytes=1000), progress=False)


TEXTS = (
    "A",
    "The capital of France is",
    "Question: What is 7 times 8?\nAnswer:",
    "To make a good cup of tea, first",
    "In the year 1969, the first people landed on the moon. " * 4 + "Their names were",
)


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Gives its first answer for ever."""
    answers: list[Any] = []

    def answer(*arguments: Any, **named: Any) -> Any:
        answers[:] = answers or [function(*arguments, **named)]
        return answers[0]

    return answer


@pytest.fixture(scope="module")
def loaded_once() -> Iterator[None]:
    """The model is loaded, and its times are measured, for the first preset and for all others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_executor, "load_static_model", once(load_static_model))
        patch.setattr(offline, "calibrate", once(calibrate))
        yield


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("preset", ["sls", "pm", "scls"])
def test_smollm2_in_slices_says_what_transformers_says(preset: str, loaded_once: None) -> None:
    folder = bundled_model("smollm2")
    limit = 30
    sampling = SamplingParams(temperature=0.0, max_tokens=limit)
    setup = StaticSetup(
        preset=preset,
        slice_tokens=None if preset == "sls" else 12,
        max_batch=3,
        interval_s=None if preset in ("sls", "so") else 0.01,
        threads=1,
    )
    shoal = StaticShoal(Service(name="smollm2", model="smollm2", dtype="float32"), setup, progress=False)
    for chat in (False, True):
        wanted = []
        for tokens in greedy_references(folder, [shoal._encode(text, chat) for text in TEXTS], limit):
            ends = [at for at, token in enumerate(tokens) if token in shoal.tokenizer.eos_token_ids]
            wanted.append(tuple(tokens[: ends[0] + 1] if ends else tokens))
        outcome = shoal.generate(TEXTS, sampling, chat=chat, progress=False)
        assert [answer.tokens for answer in outcome.completions] == wanted
        assert (max(outcome.report.slices) > 1) == (preset != "sls")
