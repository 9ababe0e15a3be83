import gc
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from dataclasses import replace

import pytest
from engine_builders import expected_tokens, make_request

import shoal.frontend.offline_api as offline
from shoal import SLO, SamplingParams, Service, Shoal
from shoal.core import ConfigError, FinishReason, InvalidRequest, QueueFull, SamplingDefaults, derive_seed
from shoal.frontend.choice_requests import expand_choices
from shoal.kvcache.options import KVCacheOptions
from shoal.schedule.weights_options import WeightsOptions

SMALL = KVCacheOptions(memory_bytes=1 << 14, block_size=4)


pytestmark = pytest.mark.usefixtures("fake_models")


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 8} | fields))


def two_services() -> Shoal:
    return Shoal([Service(name="a", model="fake"), Service(name="b", model="fake")], kv_cache=SMALL)


def expected_text(prompt: str, limit: int = 8) -> str:
    return bytes(expected_tokens(make_request(prompt=list(prompt.encode())), limit)).decode()


def test_one_prompt_by_model_name():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        [output] = shoal.generate("hello", greedy())
        assert list(shoal.info.services) == ["fake"]
    assert output.prompt == "hello"
    assert output.prompt_token_ids == tuple(b"hello")
    assert output.text == expected_text("hello")
    [completion] = output.outputs
    assert (completion.prompt_tokens, completion.finish_reason) == (5, FinishReason.LENGTH)
    assert completion.record.output_tokens == len(completion.tokens) == 8


def test_sampling_defaults_of_the_service_precede_those_of_the_model(monkeypatch, tmp_path):
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "repetition_penalty": 2})
    )
    monkeypatch.setattr(offline, "resolve_service", lambda service, progress=None: tmp_path)
    warm = Service(name="warm", model="fake", sampling=SamplingDefaults(temperature=1))
    with Shoal([Service(name="cold", model="fake"), warm], kv_cache=SMALL) as shoal:
        cold, warm = (service.sampling for service in shoal.options.services)
        assert cold == SamplingDefaults(temperature=0, top_p=1, top_k=0, min_p=0, repetition_penalty=2)
        assert warm == replace(cold, temperature=1)
        asked = {"max_tokens": 8, "seed": 1}
        outputs = shoal.generate(
            ["hello"] * 4,
            [asked, asked, asked | {"temperature": 0}, SamplingParams(**asked)],
            service=["cold", "warm", "warm", "cold"],
        )
        with pytest.raises(InvalidRequest, match="tempratur: unknown key, did you mean 'temperature'"):
            shoal.generate("hello", {"tempratur": 0}, service="cold")
    texts = [output.text for output in outputs]
    assert texts[0] == texts[2] == expected_text("hello")
    assert texts[1] == texts[3] != texts[0]


def test_many_prompts_come_back_in_order():
    prompts = [f"prompt {i}" * (1 + i % 4) for i in range(60)]
    with two_services() as shoal:
        sampling = [greedy(max_tokens=1 + i % 9) for i in range(60)]
        outputs = shoal.generate(prompts, sampling, service=["a", "b"] * 30)
        assert [o.prompt for o in outputs] == prompts
        assert [o.outputs[0].service for o in outputs] == ["a", "b"] * 30
        assert [o.text for o in outputs] == [expected_text(p, 1 + i % 9) for i, p in enumerate(prompts)]
        stats = shoal.stats()
        assert sum(s.finished for s in stats.services.values()) == 60
        assert stats.pool.live_bytes == 0


@pytest.mark.parametrize(("prompts", "count"), [([104, 105], 1), ([[104, 105], "hi", (1, 2)], 3), ([], 0)])
def test_prompts_may_be_token_ids(prompts, count):
    with Shoal("fake", kv_cache=SMALL) as shoal:
        outputs = shoal.generate(prompts, greedy())
    assert len(outputs) == count
    if count:
        assert outputs[0].text == expected_text("hi")


def test_chat_uses_the_template():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        talk = [{"role": "user", "content": "hi"}]
        [one] = shoal.chat(talk, greedy())
        both = shoal.chat([talk, talk], greedy())
    assert one.text == expected_text("<user>hi<assistant>")
    assert [output.text for output in both] == [one.text] * 2


def test_choices_differ_and_repeat_with_their_seed():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        sampling = SamplingParams(max_tokens=10, n=3, seed=11)
        [first], [second] = (shoal.generate("x", sampling) for _ in range(2))
    texts = [completion.text for completion in first.outputs]
    assert [completion.choice for completion in first.outputs] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [completion.text for completion in second.outputs]
    [request] = expand_choices("x", "fake", list(b"x"), SamplingParams(max_tokens=10, seed=11), 0)
    assert request.seed == derive_seed(11, 0)
    assert texts[0] == bytes(expected_tokens(request, 10)).decode()


def test_stop_strings_cut_the_text():
    whole = expected_text("hello", 40)
    stop = whole[6:9]
    with Shoal("fake", kv_cache=SMALL) as shoal:
        [output] = shoal.generate("hello", greedy(max_tokens=40, stop=(stop,)))
        assert shoal.stats().services["fake"].running == 0
    [completion] = output.outputs
    assert completion.text == whole[: whole.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == (FinishReason.STOP, stop)


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (None, [SLO(), SLO()]),
        (SLO(ttft_s=1), [SLO(ttft_s=1)] * 2),
        ([SLO(e2e_s=2), SLO(tpot_s=0.1)], [SLO(e2e_s=2), SLO(tpot_s=0.1)]),
    ],
)
def test_slos_are_passed_with_the_prompts(slo, expected):
    with two_services() as shoal:
        submit, seen = shoal._engine.submit, []
        shoal._engine.submit = lambda request: (seen.append(request.slo), submit(request))
        shoal.generate(["x", "y"], greedy(), service="a", slo=slo)
        shoal.chat([[{"role": "user", "content": text}] for text in "xy"], greedy(), service="b", slo=slo)
    assert seen == expected * 2


@pytest.mark.parametrize(
    ("slo", "words"),
    [
        (SLO(e2e_scale=5), r"slo\.e2e_scale is a multiple of the service's execution time"),
        ([SLO(), SLO(ttft_s=0)], r"slo\.ttft must be more than 0"),
        ([SLO()] * 3, "slo has 3 values for 2 prompts"),
    ],
)
def test_invalid_slos_are_rejected(slo, words):
    with two_services() as shoal, pytest.raises(InvalidRequest, match=words):
        shoal.generate(["x", "y"], greedy(), service="a", slo=slo)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"slo": SLO(e2e_scale=5)}, "service a: slo.e2e_scale is a multiple .* `shoal profile`"),
        ({"slo": SLO(ttft_s=-1)}, "service a: slo.ttft must be more than 0"),
        ({"execution_s": 0.0}, "execution_s of service a must be more than 0"),
        ({"execution_s": float("nan")}, "execution_s of service a must be more than 0"),
        ({"quota": 0}, "quota of service a must be at least 1"),
    ],
)
def test_services_with_invalid_slos_are_rejected(fields, words):
    with pytest.raises(ConfigError, match=words):
        Shoal(Service(name="a", model="fake", **fields))


@pytest.mark.parametrize(
    ("prompts", "sampling", "service", "words"),
    [
        (["fine", ""], greedy(), "a", "empty"),
        (["fine", [5000]], greedy(), "a", "vocabulary"),
        (["fine", "x" * 300], greedy(), "a", "at most"),
        (["fine"], greedy(), "nobody", "available: a, b"),
        (["fine"], greedy(), None, "several services"),
        (["fine"] * 2, [greedy()] * 3, "a", "3 values for 2 prompts"),
        (["fine", 7], greedy(), "a", "mixture"),
    ],
)
def test_an_invalid_prompt_fails_the_call_before_anything_runs(prompts, sampling, service, words):
    with two_services() as shoal:
        with pytest.raises(InvalidRequest, match=words):
            shoal.generate(prompts, sampling, service=service)
        assert shoal.stats().steps.count == 0
        assert all(s.waiting == 0 for s in shoal.stats().services.values())


def test_an_interrupt_cancels_the_call_and_the_engine_stays_usable():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        executor = shoal._engine.fake_executor
        collect = executor.collect

        def interrupted_collect():
            if executor.steps == 5:
                os.kill(os.getpid(), signal.SIGINT)
                while not shoal._engine.interrupted():
                    time.sleep(0.001)
            return collect()

        executor.collect = interrupted_collect
        with pytest.raises(KeyboardInterrupt):
            shoal.generate(["a", "b", "c"], greedy(max_tokens=100))
        assert executor.steps <= 7
        stats = shoal.stats().services["fake"]
        assert (stats.cancelled, stats.running, stats.waiting, stats.live_blocks) == (3, 0, 0, 0)
        [output] = shoal.generate("hello", greedy())
        assert output.text == expected_text("hello")


def test_a_prompt_rejected_by_the_engine_fails_the_call(monkeypatch):
    with Shoal("fake", kv_cache=SMALL) as shoal:
        submit = shoal._engine.submit

        def refusing_submit(request):
            if request.prompt == [3]:
                raise QueueFull("no place", 1.0)
            submit(request)

        monkeypatch.setattr(shoal._engine, "submit", refusing_submit)
        with pytest.raises(QueueFull):
            shoal.generate([[1], [2], [3], [4]], greedy())
        stats = shoal.stats()
        assert (stats.services["fake"].cancelled, stats.services["fake"].waiting) == (2, 0)
        assert stats.steps.count == 0


def test_a_closed_shoal_raises_config_error():
    shoal = Shoal("fake", kv_cache=SMALL)
    shoal.close()
    shoal.close()
    with pytest.raises(ConfigError, match="closed"):
        shoal.generate("hello")


def test_services_must_have_different_names():
    with pytest.raises(ConfigError, match="more than once"):
        Shoal(["fake", "fake"])
    with pytest.raises(ConfigError, match="at least one service"):
        Shoal([])


def test_nothing_is_printed_without_a_terminal(capfd):
    with Shoal("fake", kv_cache=SMALL) as shoal:
        shoal.generate(["a", "b"], greedy())
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_standard_error_may_be_closed(monkeypatch):
    monkeypatch.setattr("sys.stderr", None)
    with Shoal("fake", kv_cache=SMALL) as shoal:
        [output] = shoal.generate("hello", greedy())
    assert output.text == expected_text("hello")


def test_sampling_parameters_may_be_given_by_name():
    with Shoal("fake", kv_cache=SMALL) as shoal:
        talk = [{"role": "user", "content": "hi"}]
        [four] = shoal.generate("hello", max_tokens=4, temperature=0)
        [chat] = shoal.chat(talk, max_tokens=4, temperature=0)
        for stop in ("w", ["w"], ("q", "w")):
            [stopped] = shoal.generate("hello", max_tokens=40, temperature=0, stop=stop)
            assert stopped.text == expected_text("hello", 40).partition("w")[0]
        [biased] = shoal.generate("hello", max_tokens=4, temperature=0, logit_bias={97: 1.5})
        with pytest.raises(InvalidRequest, match="max_token: unknown key, did you mean 'max_tokens'"):
            shoal.generate("hello", max_token=4)
        with pytest.raises(InvalidRequest, match=r"sampling= and parameters by name \(max_tokens\)"):
            shoal.generate("hello", {"temperature": 0}, max_tokens=4)
        with pytest.raises(InvalidRequest, match="max_tokens: 'four' has the wrong type"):
            shoal.generate("hello", max_tokens="four")
    assert four.text == biased.text == expected_text("hello", 4)
    assert chat.text == expected_text("<user>hi<assistant>", 4)


@pytest.mark.parametrize(
    ("kv_memory", "size"), [("64MiB", 64 << 20), ("16 KiB", 1 << 14), (1 << 14, 1 << 14), (None, None)]
)
def test_kv_memory_may_have_a_unit(kv_memory, size):
    options = KVCacheOptions(block_size=8)
    with Shoal("fake", kv_memory=kv_memory, kv_cache=options) as shoal:
        assert shoal.options.kv_cache == replace(options, memory_bytes=size)


def test_the_memory_for_weights_may_be_limited():
    weights = WeightsOptions(memory_bytes=1 << 30, quantum_s=2)
    with Shoal("fake", kv_cache=SMALL, weights=weights) as shoal:
        assert shoal.options.weights == weights


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_memory": "64 apples"}, "kv_memory: expected a size such as 512MB, .* got '64 apples'"),
        ({"kv_memory": 0}, "kv_memory must be at least 1 byte, got 0"),
        ({"kv_memory": "1MiB", "kv_cache": SMALL}, "kv_memory and kv_cache.memory_bytes both"),
    ],
)
def test_invalid_kv_memory_is_rejected(fields, words):
    with pytest.raises(ConfigError, match=words):
        Shoal("fake", **fields)


def test_an_unreferenced_shoal_is_freed():
    shoal = Shoal("fake", kv_cache=SMALL)
    shoal.generate("hello", max_tokens=4)
    engine, thread = weakref.ref(shoal._engine), shoal._runner.thread._thread
    del shoal
    gc.collect()
    thread.join(30)
    gc.collect()
    assert engine() is None


def test_the_package_lists_its_names_and_imports_no_torch():
    code = (
        "import sys, shoal; print(*dir(shoal)); shoal.SamplingParams; shoal.ShoalError\n"
        "assert 'torch' not in sys.modules\n"
        "from shoal import *; print(Shoal.__name__, Service.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    shown, named = done.stdout.splitlines()
    assert {"Shoal", "Service", "SamplingParams", "SLO", "__version__", "__doc__"} <= set(shown.split())
    assert named == "Shoal Service"
