"""Aliases and hints for flags and environment variables of vLLM, SGLang, TGI, llama.cpp and Ollama.

An alias has exactly the meaning of our flag, and is read as our flag. Other flags have a hint: what to write
instead, or to leave the flag out.
"""

import re
from collections.abc import Container, Mapping

POSITIONAL = ""
"""Alias of flags whose value is a positional MODEL argument."""
ALIASES: Mapping[str, str] = {
    "--model": POSITIONAL,
    "-m": POSITIONAL,
    "--max-num-batched-tokens": "--max-batched-tokens",
    "--kv-cache-memory-bytes": "--kv-memory",
    "--enable-prefix-caching": "--prefix-caching",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--scheduling-policy": "--order",
    # SGLang's
    "--model-path": POSITIONAL,
    "--context-length": "--max-model-len",
    "--page-size": "--block-size",
    "--disable-radix-cache": "--no-prefix-caching",
    "--admin-api-key": "--admin-key",
    "--load-format": "--weights",
    # Text Generation Inference's
    "--model-id": POSITIONAL,
    "--hostname": "--host",
    # llama.cpp's
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--chat-template-file": "--chat-template",
}
"""Our flag for each flag of another server, both with dashes."""
OWN_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp", "--tp-size"), "--tp"),
    **dict.fromkeys(("--data-parallel-size", "-dp", "--dp", "--dp-size"), "--engines"),
}
"""Aliases of flags of simulations; in servers, which lack these flags, they have hints."""
VALUES: Mapping[str, Mapping[str, str]] = {
    "--dtype": {"half": "float16", "float": "float32"},
    "--weights": {"dummy": "random", "auto": "files", "safetensors": "files"},
}
"""Aliases of values, by our flag."""

_ONE_DEVICE = (
    "leave it out: an engine runs a model on one device; every further --device is an engine with a copy, "
    "as with --device cuda:0 --device cuda:1"
)
_POOL = "write --kv-memory SIZE for the KV pool, such as 8GiB; without it, it takes what is left of 90%"
_RUNNING = "write --max-running N, which counts the requests of all services together"
_CHUNKS = "leave it out: prompts are always cut into chunks; --max-batched-tokens N bounds a step"
_GRAPHS = "write --attention batched for an engine without CUDA graphs, or leave it out"
_QUANTISED = (
    "leave it out: the model's files say how they are quantised; "
    "--service NAME=MODEL,dtype=int8 does it at load, on CPUs"
)
_NO_CODE = "leave it out: no code from model folders is run, and a model that needs some is refused"
_TOKENIZER = "leave it out: the tokenizer is the one in the model's folder"
_TOOLS = "leave it out: tools and reasoning are read as the model's chat template writes them"
_FILES = "leave it out, and name a folder that has these files as MODEL"
_NO_ADAPTERS = "leave it out: there are no adapters (LoRA)"
_NO_SPECULATION = "leave it out: there is no speculative decoding"
_NO_IMAGES = "leave it out: text is all that goes in"
_NO_TLS = "put a proxy with TLS in front"
_GRAMMARS = "leave it out: llguidance is the only backend of structured output"
_SAMPLING = "write the defaults of a service, as in --service NAME=MODEL,sampling.temperature=0"
_METRICS = "leave it out: /metrics is always there"
_ACCESS = "leave it out: requests are not logged unless --access-log is given"
_SEED = "leave it out: requests bring seeds of their own"
_SLOTS = "write --max-running N; the KV pool is shared, and a slot has no context of its own"
_ALWAYS = "leave it out: that is always so"
_BY_REQUEST = "leave it out: requests ask for it"
_ONE_PROCESS = "leave it out: one process answers HTTP, and engines are processes of their own"

_HINTS: tuple[tuple[str, str], ...] = (
    ("--max-num-seqs --max-running-requests", _RUNNING),
    (
        "--gpu-memory-utilization --mem-fraction-static --num-gpu-blocks-override --max-batch-total-tokens"
        " --cuda-memory-fraction",
        _POOL,
    ),
    (
        "--max-total-tokens",
        "write --max-model-len TOKENS for the longest request, or --kv-memory SIZE for the KV pool",
    ),
    ("--max-input-tokens --max-input-length", "write --max-model-len TOKENS, of prompt and output together"),
    ("--max-concurrent-requests --max-queued-requests", "write --max-queue N, of the requests that wait"),
    (
        "--swap-space --kv-offloading-size --enable-hierarchical-cache --hicache-size --hicache-ratio",
        "write --swap SIZE with its unit, such as --swap 4GiB",
    ),
    ("--cpu-offload-gb", "leave it out: weights stay on the device"),
    (
        "--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp --pp --pp-size"
        " --data-parallel-size -dp --dp --dp-size --enable-expert-parallel --ep-size --nnodes --main-gpu"
        " --tensor-split --split-mode --dist-init-addr --sharded --num-shard",
        _ONE_DEVICE,
    ),
    ("--distributed-executor-backend", "write --backend local (processes here) or --backend ray"),
    (
        "--enforce-eager --disable-cuda-graph --compilation-config -O --cuda-graph-max-bs --cuda-graphs"
        " --max-seq-len-to-capture --enable-torch-compile",
        _GRAPHS,
    ),
    ("--attention-backend --flash-attn -fa", "write --attention auto, native, triton, batched or reference"),
    ("--quantization -q --quantize --torchao-config", _QUANTISED),
    ("--cache-type-k --cache-type-v -ctk -ctv", "write --kv-cache-dtype auto or int8, which is of both"),
    ("--trust-remote-code", _NO_CODE),
    ("--tokenizer --tokenizer-path --tokenizer-mode --tokenizer-revision --skip-tokenizer-init", _TOKENIZER),
    (
        "--revision --code-revision --hf-config-path --hf-overrides --json-model-override-args"
        " --rope-scaling --rope-theta --rope-factor",
        _FILES,
    ),
    ("--hf-token", "set HF_TOKEN"),
    ("--download-dir", "set SHOAL_CACHE to the folder"),
    ("--generation-config --override-generation-config --sampling-defaults", _SAMPLING),
    ("--temp --temperature --top-k --top-p --min-p --repeat-penalty", _SAMPLING),
    (
        "--enable-chunked-prefill --no-enable-chunked-prefill --chunked-prefill-size --max-prefill-tokens"
        " --max-batch-prefill-tokens --enable-mixed-chunk"
        " --max-num-partial-prefills --long-prefill-token-threshold --batch-size --ubatch-size",
        _CHUNKS,
    ),
    ("--num-scheduler-steps", "write --max-iterations N"),
    ("--async-scheduling", "write --depth 2, which is the default on a GPU"),
    ("--no-async-scheduling --disable-overlap-schedule", "write --depth 1, which is the default on a CPU"),
    ("--schedule-policy", "write --order NAME, such as fcfs or shortest-remaining"),
    ("--schedule-conservativeness", "write --admission NAME, such as past-future or conservative"),
    (
        "--enable-auto-tool-choice --tool-call-parser --tool-parser-plugin --reasoning-parser"
        " --enable-reasoning --reasoning-format --jinja",
        _TOOLS,
    ),
    ("--enable-lora --lora-modules --max-loras --max-lora-rank --lora-paths --lora", _NO_ADAPTERS),
    (
        "--speculative-config --speculative-model --num-speculative-tokens --speculative-algorithm"
        " --model-draft --draft-max",
        _NO_SPECULATION,
    ),
    ("--limit-mm-per-prompt --mm-processor-kwargs --enable-multimodal --mmproj", _NO_IMAGES),
    ("--task --runner --convert --is-embedding --embedding --embeddings", _ALWAYS),
    ("--guided-decoding-backend --structured-outputs-config --grammar-backend", _GRAMMARS),
    ("--seed --random-seed", _SEED),
    (
        "--return-tokens-as-token-ids --enable-force-include-usage --max-logprobs --response-role"
        " --default-chat-template-kwargs",
        _BY_REQUEST,
    ),
    (
        "--trust-request-chat-template --chat-template-content-format",
        "leave it out: requests bring no templates; --chat-template replaces the model's",
    ),
    ("--api-server-count --disable-frontend-multiprocessing --headless --tokenizer-worker-num", _ONE_PROCESS),
    (
        "--kv-transfer-config --disaggregation-mode",
        "leave it out: an engine computes prompts and outputs; running requests move by themselves",
    ),
    (
        "--enable-sleep-mode",
        "write --weights-memory SIZE, and the weights of services leave for those of others; or "
        "--service NAME=MODEL,idle_after=10m, which unloads it",
    ),
    (
        "--models-max",
        "write --weights-memory SIZE: the limit is on the bytes of all weights, not on the number of models",
    ),
    (
        "--models-dir --models-preset",
        "leave it out, and name each of its models as MODEL",
    ),
    ("--models-autoload", _ALWAYS),
    ("--no-models-autoload", "leave it out: models come when requests need them"),
    ("--sleep-idle-seconds", "write --service NAME=MODEL,idle_after=10m, which unloads it"),
    ("--allowed-origins", "write --cors-origins ORIGIN, once for each, or --cors-origins '*'"),
    (
        "--allowed-methods --allowed-headers --allow-credentials",
        "leave it out: --cors-origins ORIGIN is enough",
    ),
    ("--root-path", "let a proxy take the path away"),
    ("--otlp-traces-endpoint", "leave it out: there are metrics, and no traces"),
    ("--ssl-keyfile --ssl-certfile --ssl-ca-certs --ssl-key-file --ssl-cert-file", _NO_TLS),
    ("--uvicorn-log-level --log-level-http --log-verbosity", "write --log-level info, warning or error"),
    ("--disable-log-requests --disable-uvicorn-access-log --no-enable-log-requests", _ACCESS),
    ("--enable-log-requests --log-requests", "write --access-log"),
    ("--disable-log-stats --enable-metrics --metrics", _METRICS),
    ("--enable-prompt-tokens-details --enable-cache-report --cont-batching --no-webui", _ALWAYS),
    ("--hf-repo -hf", "write the hub id as MODEL, without the flag"),
    ("--ctx-size", "write --max-model-len TOKENS, which is of one request"),
    ("--parallel -np", _SLOTS),
    ("--n-gpu-layers --gpu-layers -ngl", "write --device cuda:0 or --device cpu; a model is on one device"),
    ("--mlock --no-mmap", "leave it out: weights are read into memory"),
)
HINTS: Mapping[str, str] = {name: hint for names, hint in _HINTS for name in names.split()}
"""Hints by flag of another server, for commands that run engines."""
_ENGINE_COMMAND_FLAG = "--threads"
_ENGINE_FLAGS = {"--service", "--device"}
VARIABLES: Mapping[str, str] = {
    "VLLM_API_KEY": "SHOAL_API_KEY",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-memory",
    "OLLAMA_HOST": "--host and --port",
    "OLLAMA_ORIGINS": "--cors-origins",
    "OLLAMA_KEEP_ALIVE": "idle_after of a service, as in --service NAME=MODEL,idle_after=5m",
    "OLLAMA_CONTEXT_LENGTH": "--max-model-len",
    "OLLAMA_MAX_LOADED_MODELS": "--weights-memory SIZE, a limit on their bytes",
    "OLLAMA_NUM_PARALLEL": "--max-running",
    "OLLAMA_MAX_QUEUE": "--max-queue",
    "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype",
    "OLLAMA_MODELS": "a folder or GGUF file as MODEL",
    "LLAMA_API_KEY": "SHOAL_API_KEY",
    "LLAMA_ARG_MODELS_MAX": "--weights-memory SIZE, a limit on their bytes",
}
"""Environment variables of other servers, which have no effect, and what to use instead."""


def plain_name(flag: str) -> str:
    """A flag with dashes, as in the tables: other servers also accept underscores."""
    return flag.replace("_", "-") if flag.startswith("--") else flag


def hint(flag: str, flags: Container[str]) -> str | None:
    """The hint for another server's ``flag`` in a command with the given ``flags``, or None.

    A hint holds if the command has all flags that it names. A hint that names no flag, or a service or
    device, only holds for commands that run engines: simulations have other services and devices.
    """
    text = HINTS.get(flag)
    if text is None:
        return None
    named = set(re.findall(r"--[a-z-]+", text))
    if not named or named & _ENGINE_FLAGS:
        named.add(_ENGINE_COMMAND_FLAG)
    return text if all(name in flags for name in named) else None
