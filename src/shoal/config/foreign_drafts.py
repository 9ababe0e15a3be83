"""Drafts of a configuration, from what other servers' flags, commands and files say.

They are shown in errors, so nothing that may be a key is ever in them.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from shoal.config.flags import CLUSTER_FLAGS, ENGINE_FLAGS, MODEL_FLAGS, SERVER_FLAGS
from shoal.config.foreign_flags import ALIASES, HINTS, POSITIONAL, VALUES, plain_name

_FLAGS = {f"--{flag.name}": flag for flag in (*MODEL_FLAGS, *ENGINE_FLAGS, *CLUSTER_FLAGS, *SERVER_FLAGS)}
_SECRETS = ("--api-key", "--admin-key")
_OF_MODELS = "services[]."
# What commands say of their model in other words than flags that we read: only nearly the same, but a draft.
_NEARLY = {
    "-hf": POSITIONAL,
    "--hf-repo": POSITIONAL,
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
}


@dataclass(slots=True)
class Draft:
    """A configuration of ours, as far as something else says it."""

    services: list[dict[str, Any]] = field(default_factory=list)
    """The services."""
    rest: dict[str, Any] = field(default_factory=dict)
    """All other sections."""
    remarks: list[str] = field(default_factory=list)
    """What there is to say beside that."""

    def add(self, service: Mapping[str, Any], name: str) -> None:
        """Add a service with what is known of it; ``name`` is how the other program calls it."""
        if not service.get("model"):
            self.remarks.append(f"{name}: no model is named")
            return
        written = {"name": re.sub(r"[\s=,]+", "-", name), "model": service["model"]}
        self.services.append(written | {key: value for key, value in service.items() if key not in written})

    def set_flag(self, flag: str, value: Any, service: dict[str, Any]) -> None:
        """Write what another server's flag says: into ``service``, into a section, or as a remark."""
        ours = ALIASES.get(flag, flag)
        negated = ours.startswith("--no-")
        own = _FLAGS.get(ours.replace("--no-", "--", 1))
        if flag in HINTS:
            self.remarks.append(f"{flag}: {HINTS[flag]}")
        elif ours in _SECRETS:
            self.remarks.append(f"{flag}: set SHOAL_{ours[2:].upper().replace('-', '_')}")
        elif ours == POSITIONAL:
            service["model"] = value
        elif own is None:
            self.remarks.append(f"{flag}: not known here")
        elif own.switch:
            _put(self.rest, own.key, (str(value).lower() in ("false", "no", "off")) == negated)
        else:
            value = VALUES.get(ours, {}).get(str(value), value)
            of_model = own.key.startswith(_OF_MODELS)
            _put(service if of_model else self.rest, own.key.removeprefix(_OF_MODELS), number_or_text(value))

    def text(self) -> str:
        """YAML; with a service that stands for those that are not known, where there is none."""
        services = self.services or [{"name": "chat", "model": "smollm2"}]
        written = {"services": services, **self.rest}
        return str(yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=1000))


def service_of_command(words: Sequence[str]) -> dict[str, Any]:
    """What a command says of the model that it serves."""
    draft, service = Draft(), dict[str, Any]()
    for number, word in enumerate(words):
        before, following = words[number - 1] if number else "", words[number + 1 : number + 2]
        flag, equals, value = word.partition("=")
        flag = plain_name(flag)
        ours = _NEARLY.get(flag, ALIASES.get(flag, flag))
        value = value if equals else "".join(following)
        if word == "serve" and not value.startswith("-"):
            service["model"] = value
        elif not flag.startswith("-") or (flag == "-m" and "python" in before):
            continue
        elif ours == POSITIONAL or (ours == "--max-model-len" and value.isdecimal()):
            draft.set_flag(ours or "--model", value, service)
        elif ours != "--max-model-len" and _is_of_models(ours):
            draft.set_flag(ours, value, service)
    return service


def words_of(command: str) -> list[str]:
    """A command's words; comments of shells and broken lines are left out."""
    try:
        return shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError:
        return command.split()


def is_foreign(flag: str) -> bool:
    """Whether a flag is another server's, or is of a model here and of the server there."""
    return flag in ALIASES or flag in HINTS or _is_of_models(flag)


def number_or_text(value: Any) -> Any:
    """A number as one, so that it is written without quotes."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?\d*\.\d+", value) else value


def _is_of_models(flag: str) -> bool:
    return flag in _FLAGS and _FLAGS[flag].key.startswith(_OF_MODELS)


def _put(place: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = value
