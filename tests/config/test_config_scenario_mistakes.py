"""Errors in scenarios have their place and the possible values."""

import pytest
from config_builders import scenario

from shoal.config import prepare
from shoal.core import ConfigError
from shoal.forecast import LatencyModel, LatencyProfile, save_profile

WORK = "workload: {lengths: {prompt: 100, output: 20}, rate: 2, requests: 10}\n"
LLAMA = "latency: {roofline: {model: llama-3.1-8b, device: a100-80}}\n"
COSTS = LatencyModel(constant_s=0.01, sequence_s=1e-3, token_s=1e-4, context_s=1e-6, work_s=1e-7)


def mistake(folder, text):
    profile = LatencyProfile(device="cpu", threads=2, models={("only", 1): COSTS})
    save_profile(profile, folder / "latency.json")
    with pytest.raises(ConfigError) as error:
        prepare(scenario(folder, text))
    return str(error.value).replace(f"{folder}/", "")


def test_the_error_of_a_missing_workload_shows_examples(tmp_path):
    assert mistake(tmp_path, LLAMA).startswith(
        "scenario.yaml: workload: missing; say what arrives, as in `work"
    )


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("{}", "scenario.yaml, line 2: workload: a workload needs a trace"),
        ("{lengths: sharegpt}", "or lengths and a number of requests"),
        ("{lengths: sharegtp}", "scenario.yaml, line 2: workload.lengths: expected one of distribution-1, "),
        ("{lengths: sharegtp}", "did you mean 'sharegpt'?"),
        ("{lengths: {prompt: 0, output: 1}}", "workload.lengths.prompt: must be at least 1"),
        ("{lengths: {prompt: 5}}", "workload.lengths.output: missing; write whole number, or `fixed` or"),
        ("{lengths: {prompt: {distribution: unifrm}, output: 1}}", "did you mean 'uniform'?"),
        ("{lengths: {prompt: {low: 1}, output: 1}}", "the key 'distribution' must be one of fixed"),
        ("{lengths: {prompt: uniform:low=9, output: 1}}", "workload.lengths.prompt.high: missing"),
        ("{lengths: {prompt: 'uniform:low=9,high=5', output: 1}}", "low first; got 9 to 5"),
        ("{arrivals: {process: poison}}", "workload.arrivals.process: expected one of poisson, gamma"),
        ("{arrivals: {process: poison}}", "did you mean 'poisson'?"),
        ("{arrivals: {process: poisson}}", "workload.arrivals.rate: missing"),
        ("{arrivals: {rate: 3}}", "the key 'process' must be one of poisson, gamma"),
        ("{arrivals: {process: gamma, rate: 3, cv: 1000}}", "cv must be from 0.01 to 100"),
        (
            "{lengths: sharegpt, requests: 1, rate: 1, time_scale: 1e300}",
            "line 2: workload: time_scale must be",
        ),
        (
            "{lengths: sharegpt, requests: 1000000000000}",
            "line 2: workload.requests: must be at most",
        ),
        ("{trace: none.csv}", "scenario.yaml, line 2: workload.trace: there is no file or folder none.csv"),
        ("{trace: latency.json, format: azur}", "workload.format: expected one of azure, mooncake"),
        ("{trace: latency.json}", "latency.json: the format is not known"),
        ("{lengths: sharegpt, requests: 1, clients: 1, rate: 2}", "at no rate; leave out rate or clients"),
        ("{lengths: sharegpt, requests: 1, arrivals: at-once, rate: 2}", "have no rate"),
        (
            "{lengths: sharegpt, requests: 1, time_scale: 2, rate: 2}",
            "workload.rate: give rate or time_scale",
        ),
        ("{lengths: sharegpt, requests: 1, services: [a]}", "expected services and their shares"),
        ("{lengths: sharegpt, requests: 1, services: {default: -1}}", "workload.services.default: must be"),
        (
            "\n  lengths: sharegpt\n  requests: 1\n  services:\n    chatt: 1",
            "scenario.yaml, line 6: workload.services: no service 'chatt'; there are default",
        ),
    ],
)
def test_mistakes_in_the_workload(tmp_path, workload, expected):
    assert expected in mistake(tmp_path, f"{LLAMA}workload: {workload}\n")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("", "latency: nothing says how long steps of service default take; write {fit: FILE}"),
        ("{rofline: {device: h100}}", "line 2: latency.rofline: unknown key, did you mean 'roofline'?"),
        ("{tp: 2}", "latency: write one of fit, profile, roofline, got none"),
        ("{fit: scenario.yaml, profile: .}", "got fit and profile"),
        ("{fit: none.json}", "scenario.yaml, line 2: latency.fit: there is no file"),
        ("{fit: scenario.yaml}", "scenario.yaml: not valid JSON"),
        ("{profile: .}", "holds no profile: expected dense.csv"),
        (
            "{roofline: {device: h10}}",
            "line 2: latency.roofline.device: device 'h10' is not known; did you mean",
        ),
        ("{roofline: {device: a100}}", "not known; did you mean 'a100-40' or 'a100-80'? possible are"),
        ("{roofline: {model: llama-3.1-8b}}", "latency.roofline.device: missing; write device"),
        (
            "{roofline: {device: h100, model: lama}}",
            "line 2: latency.roofline.model: model 'lama' has no shape",
        ),
        (
            "{roofline: {device: h100, model: nothing.json}}",
            "latency.roofline.model: cannot read nothing.json",
        ),
        ("{roofline: {device: h100, model: broken.json}}", "broken.json: not valid JSON"),
        ("{roofline: {device: h100, model: deep.json}}", "deep.json: nests its values too deeply"),
        ("{roofline: {device: h100, model: list.json}}", "expected an object with keys such as"),
        ("{roofline: {device: h100, model: latency.json}}", "latency.json describes no model: the conf"),
        ("{roofline: {device: h100}}", "nothing says which model service default runs"),
        (
            "{roofline: {device: h100, model: llama-3.1-8b, tp: 5}}",
            "roofline.tp (`shoal simulate --tp`): llama-3.1",
        ),
        ("{roofline: {device: rtx-4090, model: llama-2-13b}}", "raise tp, or take a larger device"),
        ("{fit: latency.json, tp: 2}", "no latency profile of only with tensor parallel 2"),
        ("{fit: latency.json}", "kv_cache: nothing says how much memory KV of service default takes"),
        ("{fit: latency.json}\nkv_cache: {tokens: 160, layout: split}", "split needs to know the KV of"),
        ("{fit: latency.json}\nkv_cache: {tokens: 160, swap: 1GiB}", "kv_cache.swap: nothing says"),
        (
            "{fit: latency.json}\nkv_cache: {tokens: 160}\nlink: {bandwidth: 1e9, latency: 1ms}",
            "link: nothing says how many bytes of KV would move",
        ),
        ("{fit: latency.json}\nservices: [llama-3.1-8b]", "nothing says how large the pool is"),
        (
            "{roofline: {device: h100}}\nservices: [llama-3.1-8b, {name: b, model: qwen3-8b, "
            "latency: {roofline: {device: a100-80}}}]",
            "how large the pool is, as the services are on a100-80 and h100",
        ),
        (
            "{roofline: {device: h100}}\nservices: [llama-3.1-8b, qwen3-8b]\nkv_cache: {blocks: 9}",
            "differ in size",
        ),
        ("{fit: latency.json}\nkv_cache: {tokens: 160}\nengines: 1000000", "engines: must be at most 4096"),
        ("{fit: latency.json}\nkv_cache: {tokens: 160}\nsample: 1us", "sample: must be at least 1ms"),
        (
            "{fit: latency.json}\nkv_cache: {tokens: 1000000}\nengines: 2000",
            "kv_cache: 125,000,000 blocks in 2,000 engine(s), and a simulation can have 67,108,864; take",
        ),
        ("{roofline: {device: h100, model: qwen3-8b}}\nkv_cache: {memory: 1000TiB}", "kv_cache: 466,0"),
        (
            "{roofline: {device: h100, model: qwen3-8b}}\nkv_cache: {memory: 1GiB, swap: 1000TiB}\n"
            "scheduler: {preemption_mode: swap}",
            "kv_cache.swap: 466,0",
        ),
    ],
)
def test_mistakes_about_step_times_and_memory(tmp_path, rest, expected):
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "list.json").write_text("[]")
    text = WORK + (f"latency: {rest}\n" if rest else "")
    assert expected in mistake(tmp_path, text).replace(str(tmp_path), ".")


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        ("servces: [a]", "scenario.yaml, line 3: servces: unknown key, did you mean 'services'?"),
        ("memory: 2GiB", "(there is 'kv_cache.memory')"),
        (
            "kv_cache: {blocks: 3, tokens: 99}",
            "line 3: kv_cache: the pool's size is written 2 times: tokens, bl",
        ),
        ("kv_cache: {tokens: 5}", "5 tokens are less than one block of 16"),
        ("kv_cache: {memory: 1KiB}", "kv_cache.memory (flag --kv-memory): kv_cache memory of 1024"),
        ("kv_cache: {utilisation: 110%}", "kv_cache.utilisation: must be at most 1"),
        ("engines: 0", "engines: must be at least 1"),
        ("dispatch: random", "dispatch: expected one of round-robin, least-requests, least-loaded"),
        ("link: {bandwidth: 0, latency: 1ms}", "link.bandwidth: must be more than 0"),
        ("link: {latency: 1ms}", "link.bandwidth: missing"),
        (
            "engines: 2\ndrains: [{engine: 2, at: 1s}]",
            "line 4: drains[0].engine: engine 2 cannot be drained",
        ),
        ("deaths: {engine: 1, at: 1s}", "line 3: deaths[0].engine: engine 1 cannot die: there are 1, from 0"),
        ("deaths: [{engine: 0}]", "line 3: deaths[0].at: missing"),
        ("sample: 0s", "sample: must be at least 1ms"),
        ("scheduler: {admision: oracle}", "scheduler.admision: unknown key, did you mean 'admission'?"),
        ("scheduler: {starvation: rarely}", "got 'rarely', or never"),
        ("services: []", "services: name at least one, or leave the key out"),
        ("services: [{quota: 1}]", "services[0].name: missing; write a name, or a model"),
        ("services: [{name: a b}]", "use no spaces"),
        ("services:\n  - {name: a}\n  - {name: a}", "line 5: services[1].name: there is already a service"),
        ("services: [{name: a, slo: {ttft: 0s}}]", "services[0].slo.ttft: must be more than 0s"),
        ("services: [{name: a, model: qwen3-8b}]", "runs qwen3-8b, but its latency is that of llama-3.1-8b"),
        (
            "services: [{name: a}, {name: b, latency: {roofline: {device: h100, model: qwen3-8b, tp: 2}}}]",
            "but tp is 1 and 2",
        ),
    ],
)
def test_mistakes_elsewhere(tmp_path, rest, expected):
    assert expected in mistake(tmp_path, f"{LLAMA}{WORK}{rest}\n")


def test_the_examples_of_arrivals_are_valid(tmp_path):
    """Every example in the message is a scenario."""
    message = mistake(tmp_path, LLAMA + "workload: {lengths: sharegpt, requests: 3}\n")
    assert "--rate 2" in message
    assert "--clients 8" in message
    for written in ("rate: 2", "arrivals: {process: poisson, rate: 2}", "arrivals: at-once", "clients: 8"):
        assert written.removeprefix("arrivals: at").strip("-") in message
        text = f"{LLAMA}workload: {{lengths: sharegpt, requests: 3, {written}}}\n"
        assert len(prepare(scenario(tmp_path, text)).requests) == 3
