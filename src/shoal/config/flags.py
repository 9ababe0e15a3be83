"""Command-line flags of servers and engines, and their conversion to settings that override a file's."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shoal.config.policies import parse_pairs, put
from shoal.config.setting_tree import Listing, Node, Scalar, Table, problem


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, and the key that it sets."""

    name: str
    """Without the dashes."""
    key: str
    """Full path of the key."""
    metavar: str
    help: str
    switch: bool = False
    """Whether it is --name or --no-name, without a value."""
    several: bool = False
    """Whether it may be repeated; the key is a list."""
    envvar: str | None = None
    """Environment variable that is read if the flag is not given."""

    @property
    def argument(self) -> str:
        """The flag's name as a Python argument."""
        return self.name.replace("-", "_")


_FILE_SUFFIXES = (".yaml", ".yml", "Modelfile")
_SERVICES = "services[]."
MODEL_FLAGS = (
    Flag(
        "served-model-name",
        f"{_SERVICES}name",
        "NAME",
        "What clients call the MODEL, where there is one; of several write --service NAME=MODEL.",
    ),
    Flag(
        "dtype", f"{_SERVICES}dtype", "NAME", "Precision of each MODEL: auto, float32, bfloat16, ..., int8."
    ),
    Flag(
        "weights", f"{_SERVICES}weights", "NAME", "Weights of each MODEL: files, or random to measure speed."
    ),
    Flag("max-model-len", f"{_SERVICES}max_model_len", "TOKENS", "Longest prompt and output of each MODEL."),
    Flag(
        "chat-template",
        f"{_SERVICES}chat_template",
        "JINJA",
        "Chat template of each MODEL: its text, or the path of a file.",
    ),
)
"""Flags of the models in positional arguments."""
ENGINE_FLAGS = (
    Flag(
        "device",
        "devices",
        "DEVICE",
        "Device to run on: cpu or cuda:0; `shoal serve` takes it repeatedly and runs an engine on each, also "
        "on simulated:h100, which computes nothing and takes as long as an H100.",
        several=True,
    ),
    Flag(
        "kv-memory",
        "kv_cache.memory",
        "SIZE",
        "KV pool of an engine, which its services share, e.g. 2GiB.",
    ),
    Flag("kv-cache-dtype", "kv_cache.dtype", "NAME", "What KV is stored as: auto or int8."),
    Flag("block-size", "kv_cache.block_size", "TOKENS", "Tokens per KV block."),
    Flag("layout", "kv_cache.layout", "NAME", "KV pool layout: merged or split."),
    Flag("prefix-caching", "kv_cache.prefix_caching", "", "Reuse the KV of shared prefixes.", switch=True),
    Flag("swap", "kv_cache.swap", "SIZE", "Host memory for preempted KV, with --preemption-mode swap."),
    Flag(
        "weights-memory",
        "weights.memory",
        "SIZE",
        "Memory for the weights of an engine; services beyond it wait until theirs are fetched, e.g. 2GiB.",
    ),
    Flag("preset", "scheduler.preset", "NAME", "A whole scheduler by name, e.g. shoal, vllm or seallm."),
    Flag(
        "order",
        "scheduler.order",
        "NAME[:KEY=VALUE,..]",
        "Which request runs first, e.g. fcfs or mlfq:levels=4.",
    ),
    Flag(
        "admission",
        "scheduler.admission",
        "NAME[:KEY=VALUE,..]",
        "When a waiting request may start, e.g. past-future:reserved=5%.",
    ),
    Flag(
        "victim", "scheduler.victim", "NAME", "Which request is preempted when the pool is full, e.g. newest."
    ),
    Flag(
        "preemption-mode",
        "scheduler.preemption_mode",
        "NAME",
        "What becomes of preempted KV: recompute or swap.",
    ),
    Flag(
        "preempt-for-waiting",
        "scheduler.preempt_for_waiting",
        "NAME",
        "Whether waiting requests preempt less urgent ones: never, gain or less-urgent.",
    ),
    Flag("lengths", "scheduler.lengths", "NAME", "Predictor of output lengths, e.g. history or learned."),
    Flag("starvation", "scheduler.starvation", "TIME", "Wait after which a request goes first: 10s, never."),
    Flag("max-token-gap", "scheduler.max_token_gap", "TIME", "Longest wait of a stream for other services."),
    Flag(
        "on-hopeless",
        "scheduler.on_hopeless",
        "NAME",
        "Waiting requests that can no longer meet their latency goals: serve, last or refuse.",
    ),
    Flag("max-running", "scheduler.max_running", "N", "Most requests running at once."),
    Flag("max-batched-tokens", "scheduler.max_batched_tokens", "N", "Most tokens computed in one step."),
    Flag(
        "depth",
        "scheduler.depth",
        "N",
        "Steps in flight: 1, or 2 to schedule one while one is computed.",
    ),
    Flag("max-iterations", "scheduler.max_iterations", "N", "Most decode steps made under one decision."),
    Flag(
        "co-batch",
        "scheduler.co_batch",
        "",
        "Let services on the same weights decode in each other's steps.",
        switch=True,
    ),
    Flag("co-batch-rows", "scheduler.co_batch_rows", "N", "Most decodes of other services in one step."),
    Flag("threads", "threads", "N", "CPU threads of the engine."),
    Flag("attention", "attention", "NAME", "Attention backend, e.g. auto or reference."),
)
CLUSTER_FLAGS = (
    Flag(
        "latency",
        "latency",
        "NAME",
        "How long steps take with --device simulated: as on a device, e.g. h100, or as in a file of `shoal "
        "profile`.",
    ),
    Flag("backend", "cluster.backend", "NAME", "How engines run: local (processes here) or ray."),
    Flag("address", "cluster.address", "ADDRESS", "The Ray cluster: host:port, or auto."),
    Flag(
        "dispatch",
        "cluster.dispatch",
        "NAME",
        "Which engine a request goes to, e.g. max-min, or mell, which fills one before it uses the next.",
    ),
    Flag(
        "cluster-name",
        "cluster.name",
        "NAME",
        "Name of the engines, by which a server that is started again finds them.",
    ),
    Flag(
        "step-timeout",
        "cluster.step_timeout",
        "TIME",
        "An engine is killed whose step stands still for so long, e.g. 30s.",
    ),
    Flag(
        "load-timeout",
        "cluster.load_timeout",
        "TIME",
        "An engine is killed that does not get on with loading for so long, e.g. 120s.",
    ),
)
RENAMED_FLAGS = {
    "--eviction": "--preemption-mode",
    "--preempt": "--preempt-for-waiting less-urgent",
    "--no-preempt": "--preempt-for-waiting never",
    "--no-preempt-for-waiting": "--preempt-for-waiting never",
}
"""Flags of earlier versions, and their present names."""
SERVER_FLAGS = (
    Flag("host", "server.host", "ADDRESS", "Address to listen on."),
    Flag("port", "server.port", "PORT", "Port to listen on."),
    Flag("max-queue", "server.max_queue", "N", "Waiting requests before new ones get status 429."),
    Flag("drain", "server.drain", "TIME", "Time that running requests get to finish at shutdown, e.g. 30s."),
    Flag("max-body", "server.max_body", "SIZE", "Largest request body, e.g. 8MiB."),
    Flag(
        "api-key",
        "server.api_keys",
        "KEY",
        "A key that clients must send; may be repeated. It shows in lists of processes; a file does not.",
        several=True,
        envvar="SHOAL_API_KEY",
    ),
    Flag("api-key-file", "server.api_key_file", "FILE", "YAML file with keys, their names and limits."),
    Flag(
        "admin-key",
        "server.admin_key",
        "KEY",
        "The key of operators; without any key their routes answer only this machine.",
        envvar="SHOAL_ADMIN_KEY",
    ),
    Flag("admin-key-file", "server.admin_key_file", "FILE", "File with nothing but the key of operators."),
    Flag(
        "cors-origins",
        "server.cors_origins",
        "ORIGIN",
        "A web origin whose pages may use the server from a browser, or *; may be repeated.",
        several=True,
    ),
    Flag(
        "unknown-fields",
        "server.unknown_fields",
        "NAME",
        "Unknown fields of requests: ignore or refuse.",
    ),
    Flag("vllm-metrics", "server.vllm_metrics", "", "Also show metrics under vLLM's names.", switch=True),
    Flag("log-level", "server.log_level", "NAME", "Log from here on: info, warning or error."),
    Flag("access-log", "server.access_log", "", "Print a line for each request.", switch=True),
    Flag("access-log-format", "server.access_log_format", "NAME", "What such a line is: text or json."),
)


def flag_settings(
    values: Mapping[str, str | bool | Sequence[str] | None],
    *,
    services: Sequence[str] = (),
    models: Sequence[str] = (),
    flags: Sequence[Flag] = ENGINE_FLAGS + CLUSTER_FLAGS + SERVER_FLAGS,
    from_environment: Collection[str] = (),
) -> Table:
    """Settings from flags. values: by flag name; None or (): not given.

    services: each as ``name=model[,key=value...]``. models: model names, each a service of its own.
    from_environment: flags whose values come from their environment variables.
    """
    entries: dict[str, Node] = {}
    model_keys: dict[str, Node] = {}
    for flag in flags:
        value = values.get(flag.name)
        if value is None or value == ():
            continue
        place = f"--{'no-' if value is False else ''}{flag.name}"
        if flag.envvar is not None and flag.name in from_environment:
            place = flag.envvar
        if flag.key.startswith(_SERVICES):
            model_keys[flag.key.removeprefix(_SERVICES)] = _node(value, place)
        else:
            put(entries, flag.key.split("."), _node(value, place), flag.key)
    written: list[Node] = _models(models, model_keys)
    written += [_service(text) for text in services]
    if written:
        entries["services"] = Listing(tuple(written), written[0].where)
    return Table(entries, "the command line", dict.fromkeys(entries, "the command line"))


def _models(models: Sequence[str], keys: Mapping[str, Node]) -> list[Node]:
    """A service for each of ``models``, all with ``keys``; raises ConfigError for keys without models."""
    for key, value in keys.items():
        if not models or (key == "name" and len(models) > 1):
            which = (
                "needs one MODEL on the command line"
                if key == "name"
                else "is of each MODEL of the command line"
            )
            how = f"--service NAME=MODEL{'' if key == 'name' else f',{key}=VALUE'}"
            raise problem(value.where, "", f"{which}; here write {how}, or services[].{key} in the file")
    for model in models:
        if model.endswith(_FILE_SUFFIXES):
            raise problem("MODEL", "", f"{model} is no model; for a configuration write --config {model}")
    return [
        Table({"model": Scalar(model, "MODEL"), **keys}, "MODEL", dict.fromkeys(("model", *keys), "MODEL"))
        for model in models
    ]


def _node(value: str | bool | Sequence[str], place: str) -> Node:
    if isinstance(value, bool):
        return Scalar(str(value).lower(), place)
    if isinstance(value, str):
        return Scalar(value, place)
    return Listing(tuple(Scalar(text, place) for text in value), place)


def overlay(base: Table, over: Table) -> Table:
    """``base`` with the settings of ``over``; sections are merged, other values are replaced."""
    entries: dict[str, Node] = dict(base.entries)
    for key, value in over.entries.items():
        held = entries.get(key)
        both = isinstance(held, Table) and isinstance(value, Table)
        entries[key] = overlay(held, value) if both else value  # type: ignore[arg-type]
    return Table(entries, base.where, {**over.key_places, **base.key_places})


def _service(text: str) -> Table:
    where = "--service"
    head, _, rest = text.partition(",")
    name, equals, model = head.partition("=")
    if not equals:
        name, model = "", head
    if not model.strip() or (equals and not name.strip()):
        raise problem(
            where, "", f"expected NAME=MODEL[,KEY=VALUE...], for example chat=smollm2, got {text!r}"
        )
    entries: dict[str, Node] = dict(parse_pairs(rest, where, "services").entries)
    if equals:
        put(entries, ["name"], Scalar(name.strip(), where), "services")
    put(entries, ["model"], Scalar(model.strip(), where), "services")
    return Table(entries, where, dict.fromkeys(entries, where))
