"""Configuration files of other programs are recognized and converted to drafts."""

import re
from pathlib import Path

import pytest
from config_builders import HttpOptions, from_flags, from_yaml

from shoal.config import load_config
from shoal.core import SamplingDefaults, Service
from shoal.core.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
LLAMA_SWAP = """
healthCheckTimeout: 60
macros: {dir: /models, server: "llama-server --port ${PORT} -ngl 99"}
models:
  "qwen 3":
    cmd: |
      # the big one
      ${server} \\
      -m ${dir}/qwen3-4b.gguf -c 8192 --api-key sk-secret
    ttl: 300
  vl:
    cmd: env A=b vllm serve Qwen/Qwen2.5-0.5B --max-model-len=4096 --dtype half --port ${PORT}
  boxed: {cmd: "docker run --rm vllm/vllm-openai --model facebook/opt-125m", ttl: 0}
  python: {cmd: "python3 -m sglang.launch_server --model-path org/x --context-length 64"}
  hub: {cmd: "llama-server -hf org/x-GGUF:Q4_K_M -a other"}
  shell: {cmd: "bash -c 'vllm serve x'"}
"""
SWAP_GROUPS = """
globalTTL: 120
models:
  big: {cmd: "llama-server -m big.gguf"}
  small: {cmd: "llama-server -m small.gguf", ttl: 0}
  code: {cmd: "llama-server -m code.gguf", ttl: -1}
groups:
  forever: {persistent: true, swap: false, exclusive: false, members: [small]}
  others: {swap: true, exclusive: true, members: [big, code]}
"""
LITELLM = """
model_list:
  - {model_name: chat, litellm_params: {model: hosted_vllm/Qwen/Q, api_base: http://x, api_key: sk-secret}}
  - {model_name: own, litellm_params: {model: openai/own-model, api_base: http://x}}
  - {model_name: gpt-4o, litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}}
general_settings: {master_key: sk-secret}
"""
COMPOSE = """
version: "3"
services:
  vllm:
    image: vllm/vllm-openai:latest
    command: --model Qwen/Q --max-model-len 2048 --api-key sk-secret
  other:
    image: vllm/vllm-openai
    command: [facebook/opt-125m, --dtype, float, --served-model-name, opt]
  web: {image: nginx, environment: {API_KEY: sk-secret}}
"""
MODELFILE = """# mine

FROM ./x.gguf
PARAMETER temperature 0.7
PARAMETER top_k 40
parameter repeat_penalty 1.1
PARAMETER num_ctx 4096
PARAMETER stop "<|x|>"
TEMPLATE \"\"\"{{ .Prompt }}\"\"\"
SYSTEM \"\"\"
You are: a test
\"\"\"
"""
VLLM = """
model: Qwen/Q
served-model-name: [chat, b]
max_model_len: 4096
dtype: half
host: 0.0.0.0
port: 9000
api-key: sk-secret
tensor-parallel-size: 2
enable-prefix-caching: false
max-num-batched-tokens: 512
max-num-seqs: 8
nonsense: 1
"""
RAY = "applications: [{args: {llm_configs: [{model_loading_config: {model_id: q, model_source: Qwen/Q}}]}}]"


def S(name, model, **fields):
    return Service(name=name, model=model, **fields)


FILES = {
    "llama-swap": (
        LLAMA_SWAP,
        "looks like llama-swap's",
        [
            S("qwen-3", "/models/qwen3-4b.gguf", max_model_len=8192, idle_after_s=300),
            S("vl", "Qwen/Qwen2.5-0.5B", max_model_len=4096, dtype="float16"),
            S("boxed", "facebook/opt-125m"),
            S("python", "org/x", max_model_len=64),
            S("hub", "org/x-GGUF:Q4_K_M"),
        ],
        ["shell: no model is named", "add weights: {memory: SIZE}"],
    ),
    "groups of llama-swap": (
        SWAP_GROUPS,
        "looks like llama-swap's",
        [
            S("big", "big.gguf", idle_after_s=120),
            S("small", "small.gguf", pin=True),
            S("code", "code.gguf", idle_after_s=120),
        ],
        ["add weights: {memory: SIZE}"],
    ),
    "litellm": (
        LITELLM,
        "looks like LiteLLM's",
        [S("chat", "Qwen/Q"), S("own", "own-model")],
        ["gpt-4o: left out, as it runs at openai", "api_base: http://127.0.0.1:8000/v1"],
    ),
    "compose": (
        COMPOSE,
        "looks like a Compose file",
        [S("vllm", "Qwen/Q", max_model_len=2048), S("opt", "facebook/opt-125m", dtype="float32")],
        ["docs/deploy.md"],
    ),
    "modelfile": (
        MODELFILE,
        "looks like one of Ollama's Modelfiles",
        [
            S(
                "modelfile",
                "./x.gguf",
                max_model_len=4096,
                sampling=SamplingDefaults(temperature=0.7, top_k=40, repetition_penalty=1.1),
            )
        ],
        ["TEMPLATE is left out", "SYSTEM is left out"],
    ),
    "vllm": (
        VLLM,
        "looks like vLLM's or SGLang's",
        [S("chat", "Qwen/Q", max_model_len=4096, dtype="float16")],
        [
            "--api-key: set SHOAL_API_KEY",
            "--tensor-parallel-size: leave it out",
            "--max-num-seqs: write --max-running N",
            "--nonsense: not known here",
        ],
    ),
    "ray": (RAY, "looks like Ray Serve's", [S("q", "Qwen/Q")], []),
    "localai": (
        "{name: phi, backend: x, context_size: 512, parameters: {model: phi.gguf}}",
        "looks like LocalAI's",
        [S("phi", "phi.gguf", max_model_len=512)],
        [],
    ),
    "kubernetes": (
        "apiVersion: apps/v1\nkind: Deployment\nspec: {a: b}",
        "looks like a Kubernetes manifest",
        [S("chat", "smollm2")],
        ["docs/deploy.md"],
    ),
    "config.json": (
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}',
        "looks like a model's config.json",
        [S("chat", "FOLDER")],
        ["FOLDER is where this file is"],
    ),
}


def refusal(folder, text, name="file"):
    path = folder / name
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(HttpOptions, file=path)
    assert str(error.value).startswith(f"{path}: this ")
    return str(error.value)


def draft(message):
    """The configuration that an error shows: between the first and the last line."""
    return re.sub(r"(?m)^\(.*\)$", "", message.split("\n", 1)[1])


@pytest.mark.parametrize("name", FILES)
def test_a_foreign_file_is_converted_to_a_draft(name, tmp_path):
    text, looks, services, remarks = FILES[name]
    message = refusal(tmp_path, text, "Modelfile" if name == "modelfile" else "file.yaml")
    assert looks in message.splitlines()[0]
    assert list(from_yaml(tmp_path, draft(message)).services) == services
    for remark in remarks:
        assert remark in message
    assert "secret" not in message


def test_server_settings_of_a_flat_file_are_kept(tmp_path):
    config = from_yaml(tmp_path, draft(refusal(tmp_path, VLLM)))
    assert (config.server.host, config.server.port) == ("0.0.0.0", 9000)
    assert config.kv_cache.prefix_caching is False
    assert config.scheduler.max_batched_tokens == 512


@pytest.mark.parametrize(
    ("text", "caching"),
    [
        ("model: x\nenable-prefix-caching: true", True),
        ("model: x\nno-enable-prefix-caching: true", False),
        ("model-path: x\ndisable-radix-cache: true", False),
        ("model-path: x\ndisable_radix_cache: false", True),
    ],
)
def test_switches_of_flat_files(text, caching, tmp_path):
    assert from_yaml(tmp_path, draft(refusal(tmp_path, text))).kv_cache.prefix_caching is caching


@pytest.mark.parametrize("model", ["llama3.2", "llama3.2:1b"])
def test_a_model_of_ollamas_library_has_a_remark(model, tmp_path):
    message = refusal(tmp_path, f"FROM {model}\n")
    assert f"({model}: names of Ollama's library mean nothing here" in message


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_our_own_files_are_accepted(path):
    from shoal.serve.options import ServerOptions

    load_config(ServerOptions, file=path)


@pytest.mark.parametrize(
    "text",
    [
        "services: [smollm2]\nmodel: x",
        "services: [smollm2]\ndtype: float32",
        "services: [{name: chat, model: smollm2, image: x}]",
        "services: {chat: {model: smollm2}}",
        "models: [smollm2]",
        "models: {chat: smollm2}",
        "services: [smollm2]\nkind: x",
        "",
        "# FROM here on\nservices: []",
        "FROM",
    ],
)
def test_errors_in_our_own_files_show_no_draft(text, tmp_path):
    path = tmp_path / "shoal.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(HttpOptions, file=path)
    assert "looks like" not in str(error.value)


def test_aliases_of_yaml_cost_nothing(tmp_path):
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 60)]
    with pytest.raises(ConfigError, match="unknown key"):
        from_yaml(tmp_path, "\n".join(["services: [smollm2]", *lines]))


@pytest.mark.parametrize("file", ["shoal.yaml", "a/b.yml", "Modelfile"])
def test_a_configuration_file_as_a_model_is_an_error(file):
    with pytest.raises(
        ConfigError, match=f"MODEL: {file} is no model; for a configuration write --config {file}"
    ):
        from_flags(file)
