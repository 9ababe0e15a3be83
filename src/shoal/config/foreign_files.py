"""Recognizes configuration files of other programs (Ollama, LiteLLM, Compose, vLLM, ...), and shows a draft.

They are never used as a configuration: the error shows a draft of one, to be checked and saved.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.foreign_drafts import Draft, is_foreign, number_or_text, service_from_command, split_command
from shoal.config.foreign_flags import plain_name
from shoal.config.setting_tree import Listing, Node, Scalar, Table
from shoal.core import ConfigError

_PARAMETERS = {
    "num_ctx": "max_model_len",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "min_p": "sampling.min_p",
    "repeat_penalty": "sampling.repetition_penalty",
}
"""Parameters of Modelfiles, and our keys of a service."""
_UNSUPPORTED = {
    "TEMPLATE": "chat_template takes Jinja only",
    "SYSTEM": "clients send system prompts",
    "ADAPTER": "there are no adapters (LoRA)",
    "MESSAGE": "clients send messages",
}
_LOCAL_PROVIDERS = ("hosted_vllm", "vllm", "huggingface", "ollama", "ollama_chat", "lm_studio", "llamafile")
_MORE_THAN_FIT = (
    "all of these are in memory together; if they do not fit, add weights: {memory: SIZE}, and they come "
    "when requests need them: docs/many-models.md"
)
_COMPOSE_KEYS = frozenset({"image", "build", "container_name"})


def reject_modelfile(text: str, path: Path) -> None:
    """Raise ConfigError if ``text`` is one of Ollama's Modelfiles."""
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.strip() and line.strip()[0] != "#"]
    if not lines or len(lines[0]) < 2 or lines[0][0].upper() != "FROM":
        return
    model = lines[0][1]
    service: dict[str, Any] = {"model": model}
    draft = Draft()
    if "/" not in model and not model.endswith(".gguf"):
        draft.remarks.append(
            f"{model}: names of Ollama's library mean nothing here; name a file, folder or hub id"
        )
    for word, *rest in lines[1:]:
        if word.upper() == "PARAMETER" and len(rest) == 2 and rest[0] in _PARAMETERS:
            section, _, key = _PARAMETERS[rest[0]].rpartition(".")
            (service.setdefault(section, {}) if section else service)[key] = number_or_text(rest[1].strip())
    words = {words[0].upper() for words in lines}
    draft.remarks += [f"{word} is left out: {why}" for word, why in _UNSUPPORTED.items() if word in words]
    draft.add(service, path.stem.lower())
    raise _error(path, "one of Ollama's Modelfiles", draft)


def reject_foreign_yaml(table: Table, path: Path) -> None:
    """Raise ConfigError if the settings of a file are another program's configuration."""
    content: dict[str, Any] = _to_plain(table, {})
    for format_name, read in _READERS.items():
        draft = read(content)
        if draft is not None:
            raise _error(path, format_name, draft)


def _error(path: Path, format_name: str, draft: Draft) -> ConfigError:
    head = f"{path}: this looks like {format_name}, and not like Shoal's configuration. For Shoal write"
    return ConfigError(
        "\n".join([head, "", draft.text(), *(f"({remark})" for remark in draft.remarks)]).rstrip()
    )


def _llama_swap(content: Mapping[str, Any]) -> Draft | None:
    """``models: {NAME: {cmd: llama-server -m FILE ...}}``."""
    models = content.get("models")
    if not isinstance(models, dict) or not any("cmd" in _mapping(model) for model in models.values()):
        return None
    draft = Draft(remarks=["Shoal runs all services itself, and starts no other programs"])
    if len(models) > 1:
        draft.remarks.append(_MORE_THAN_FIT)
    groups = map(_mapping, _mapping(content.get("groups")).values())
    staying = {name for group in groups if group.get("persistent") == "true" for name in _members(group)}
    for name, model in models.items():
        command, ttl = str(_mapping(model).get("cmd", "")), str(_mapping(model).get("ttl", "-1"))
        for macro, value in _mapping(content.get("macros")).items():
            command = command.replace(f"${{{macro}}}", str(value))
        ttl = str(content.get("globalTTL", "0")) if ttl == "-1" else ttl
        known: dict[str, Any] = {"idle_after": f"{ttl}s"} if ttl.isdecimal() and int(ttl) else {}
        known |= {"pin": True} if name in staying else {}
        draft.add(service_from_command(split_command(command)) | known, name)
    return draft


def _members(group: Mapping[str, Any]) -> list[str]:
    members = group.get("members")
    return list(map(str, members)) if isinstance(members, list) else []


def _litellm(content: Mapping[str, Any]) -> Draft | None:
    """``model_list: [{model_name: NAME, litellm_params: {model: PROVIDER/MODEL, ...}}]``."""
    models = content.get("model_list")
    if not isinstance(models, list):
        return None
    draft = Draft(
        remarks=[
            "LiteLLM passes requests on to servers. To have it pass them on to Shoal, keep its file, and "
            "write there model: openai/NAME with api_base: http://127.0.0.1:8000/v1"
        ]
    )
    for entry in map(_mapping, models):
        parameters = _mapping(entry.get("litellm_params"))
        provider, _, model = str(parameters.get("model", "")).partition("/")
        name = str(entry.get("model_name") or model)
        if provider in _LOCAL_PROVIDERS or "api_base" in parameters:
            draft.add({"model": model}, name)
        else:
            draft.remarks.append(f"{name}: left out, as it runs at {provider or 'another place'}")
    return draft


def _compose(content: Mapping[str, Any]) -> Draft | None:
    """``services: {NAME: {image: IMAGE, command: ...}}``; ours are a list."""
    services = _mapping(content.get("services"))
    if not any(_COMPOSE_KEYS & _mapping(entry).keys() for entry in services.values()):
        return None
    draft = Draft(remarks=["in a container, run shoal serve --config with it: docs/deploy.md"])
    for name, entry in services.items():
        command = _mapping(entry).get("command")
        words = list(map(str, command)) if isinstance(command, list) else split_command(str(command or ""))
        if "vllm" in str(_mapping(entry).get("image")) and words and not words[0].startswith("-"):
            words = ["serve", *(words[1:] if words[0] == "serve" else words)]
        service = service_from_command(words)
        if "model" in service:
            draft.add(service, str(service.get("name", name)))
    return draft


def _kubernetes(content: Mapping[str, Any]) -> Draft | None:
    """``apiVersion: V``, ``kind: K``."""
    if not {"apiVersion", "kind"} <= content.keys():
        return None
    return Draft(remarks=["in Kubernetes, this is a file in the container: docs/deploy.md"])


def _ray_serve(content: Mapping[str, Any]) -> Draft | None:
    """``applications``, and in it ``model_loading_config: {model_id: NAME, model_source: MODEL}``."""
    if not isinstance(content.get("applications"), list):
        return None
    draft = Draft()
    for config in map(_mapping, _find(content, "model_loading_config")):
        draft.add(
            {"model": config.get("model_source") or config.get("model_id")}, str(config.get("model_id"))
        )
    return draft


def _local_ai(content: Mapping[str, Any]) -> Draft | None:
    """``name: NAME``, ``parameters: {model: FILE}``, ``context_size: N``."""
    model = _mapping(content.get("parameters")).get("model")
    if model is None:
        return None
    draft, size = Draft(), content.get("context_size")
    draft.add(
        {"model": model} | ({"max_model_len": number_or_text(size)} if size else {}),
        content.get("name", "chat"),
    )
    return draft


def _model_config(content: Mapping[str, Any]) -> Draft | None:
    """``architectures: [CLASS]``, ``model_type: NAME``."""
    if not {"architectures", "model_type"} & content.keys():
        return None
    draft = Draft(remarks=["FOLDER is where this file is, with the model's weights"])
    draft.add({"model": "FOLDER"}, "chat")
    return draft


def _flat(content: Mapping[str, Any]) -> Draft | None:
    """Names of flags as keys."""
    flags = {plain_name(f"--{key}"): value for key, value in content.items()}
    if "services" in content or not any(map(is_foreign, flags)):
        return None
    draft, service = Draft(), dict[str, Any]()
    for flag, value in flags.items():
        several = isinstance(value, list)
        draft.set_flag(
            flag, value[0] if several and value and flag == "--served-model-name" else value, service
        )
    if "model" in service:
        draft.add(service, str(service.get("name", service["model"])))
    return draft


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Draft | None]] = {
    "llama-swap's": _llama_swap,
    "LiteLLM's": _litellm,
    "a Compose file": _compose,
    "a Kubernetes manifest": _kubernetes,
    "Ray Serve's": _ray_serve,
    "LocalAI's": _local_ai,
    "a model's config.json": _model_config,
    "vLLM's or SGLang's": _flat,
}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _find(content: Any, name: str) -> Iterator[Any]:
    """Yields all values of the key ``name``, at any depth."""
    if isinstance(content, dict):
        yield from (value for key, value in content.items() if key == name)
    inner = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    for value in inner:
        yield from _find(value, name)


def _to_plain(node: Node, done: dict[int, Any]) -> Any:
    """Settings as plain values. done: values by node id, as aliases may repeat a node very often."""
    if id(node) not in done:
        match node:
            case Scalar():
                done[id(node)] = node.text
            case Listing():
                done[id(node)] = [_to_plain(item, done) for item in node.items]
            case Table():
                done[id(node)] = {key: _to_plain(value, done) for key, value in node.entries.items()}
    return done[id(node)]
