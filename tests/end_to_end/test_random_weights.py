"""Services with random weights, in whole engines."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from end_to_end_builders import make_request, run_engine
from execute_builders import make_prompt, tiny_config

from at_hand import DEVICE
from shoal import Service, Shoal
from shoal.core import ConfigError, InvalidRequest
from shoal.engine import EngineOptions, build_engine
from shoal.kvcache import KVCacheOptions

KINDS = ("llama", "qwen2", "gemma3")
PROMPTS = [make_prompt(n, seed=n) for n in (3, 20)]
GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with nothing but a config.json."""
    root = tmp_path_factory.mktemp("configs")
    for kind in KINDS:
        (root / kind).mkdir()
        config = tiny_config(kind).to_dict() | {"dtype": "float32"}
        (root / kind / "config.json").write_text(json.dumps(config))
    return {kind: root / kind for kind in KINDS}


def generated(services: Mapping[str, Service], threads: int = 1) -> dict[str, list[tuple[int, ...]]]:
    """What each of the services says to the prompts."""
    with Shoal(
        list(services.values()), kv_memory="4MiB", threads=threads, device=DEVICE, progress=False
    ) as shoal:
        outputs = {name: shoal.generate(PROMPTS, service=name, progress=False, **GREEDY) for name in services}
    return {name: [output.outputs[0].tokens for output in each] for name, each in outputs.items()}


def test_config_json_is_all_that_the_offline_interface_needs(folders: dict[str, Path]) -> None:
    services = {
        kind: Service(name=kind, model=str(folder), weights="random") for kind, folder in folders.items()
    }
    services["again"] = replace(services["llama"], name="again")
    services["other"] = replace(services["llama"], name="other", weights_seed=1)
    said = generated(services)
    assert {len(tokens) for each in said.values() for tokens in each} == {6}
    assert said["again"] == said["llama"]
    assert said["other"] != said["llama"]
    assert generated({"llama": services["llama"]}) == {"llama": said["llama"]}
    requests = [make_request(str(i), "llama", prompt, 6) for i, prompt in enumerate(PROMPTS)]
    outcome = run_engine({"llama": folders["llama"]}, [requests], weights="random")
    assert [tuple(outcome.tokens[str(i)]) for i in range(len(PROMPTS))] == said["llama"]


def test_text_needs_a_tokenizer(folders: dict[str, Path]) -> None:
    service = Service(name="s", model=str(folders["llama"]), weights="random")
    with Shoal(service, kv_memory="4MiB", threads=1, device=DEVICE, progress=False) as shoal:
        with pytest.raises(InvalidRequest, match="has no tokenizer files"):
            shoal.generate("some text")
        with pytest.raises(InvalidRequest, match="no chat template"):
            shoal.chat([{"role": "user", "content": "hi"}])
        [output] = shoal.generate(PROMPTS[0], max_tokens=4, ignore_eos=True, logprobs=2, progress=False)
    assert (output.text, len(output.outputs[0].logprobs or ())) == ("", 4)


def test_a_seed_without_random_weights_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="weights_seed is of random weights only"):
        Shoal(Service(name="s", model=str(folders["llama"]), weights_seed=1))


def test_kv_of_other_random_weights_has_another_form(folders: dict[str, Path]) -> None:
    def forms(*seeds: int) -> list[str]:
        services = tuple(
            Service(name=f"{at}", model="m", weights="random", weights_seed=seed)
            for at, seed in enumerate(seeds)
        )
        options = EngineOptions(
            services=services, kv_cache=KVCacheOptions(memory_bytes=1 << 20), threads=1, device=DEVICE
        )
        engine, info = build_engine(options, {service.name: folders["llama"] for service in services})
        engine.close()
        assert info.weight_bytes == len(set(seeds)) * info.services["0"].weight_bytes
        return [info.services[service.name].kv_format for service in services]

    first, same, other = forms(4, 4, 5)
    assert first == same != other
    assert forms(5) == [other]
