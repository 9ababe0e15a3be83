"""Drafts of a Shoal configuration, converted from flags, commands and files of other servers.

They are shown in errors, so they never contain anything that may be an API key.
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
_SERVICES = "services[]."
# Flags in commands with nearly the same meaning as ours: close enough for a draft.
_APPROXIMATE_ALIASES = {
    "-hf": POSITIONAL,
    "--hf-repo": POSITIONAL,
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
}


@dataclass(slots=True)
class Draft:
    """A partial Shoal configuration, with remarks."""

    services: list[dict[str, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    """Remarks for the user."""

    def add(self, service: Mapping[str, Any], name: str) -> None:
        """Add a service with its known keys; name: in the other program."""
        if not service.get("model"):
            self.remarks.append(f"{name}: no model is named")
            return
        written = {"name": re.sub(r"[\s=,]+", "-", name), "model": service["model"]}
        self.services.append(written | {key: value for key, value in service.items() if key not in written})

    def set_flag(self, flag: str, value: Any, service: dict[str, Any]) -> None:
        """Convert a flag of another server: into ``service``, into a section, or into a remark."""
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
            is_model_key = own.key.startswith(_SERVICES)
            _put(
                service if is_model_key else self.rest,
                own.key.removeprefix(_SERVICES),
                number_or_text(value),
            )

    def text(self) -> str:
        """The draft as YAML, with an example service if it has none."""
        services = self.services or [{"name": "chat", "model": "smollm2"}]
        written = {"services": services, **self.rest}
        return str(yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=1000))


def service_from_command(words: Sequence[str]) -> dict[str, Any]:
    """The keys of a service that a command of another server sets."""
    draft, service = Draft(), dict[str, Any]()
    for number, word in enumerate(words):
        before, following = words[number - 1] if number else "", words[number + 1 : number + 2]
        flag, equals, value = word.partition("=")
        flag = plain_name(flag)
        ours = _APPROXIMATE_ALIASES.get(flag, ALIASES.get(flag, flag))
        value = value if equals else "".join(following)
        if word == "serve" and not value.startswith("-"):
            service["model"] = value
        elif not flag.startswith("-") or (flag == "-m" and "python" in before):
            continue
        elif ours == POSITIONAL or (ours == "--max-model-len" and value.isdecimal()):
            draft.set_flag(ours or "--model", value, service)
        elif ours != "--max-model-len" and _is_model_flag(ours):
            draft.set_flag(ours, value, service)
    return service


def split_command(command: str) -> list[str]:
    """The words of a shell command, without comments and line continuations."""
    try:
        return shlex.split(command.replace("\\\n", " "), comments=True)
    except ValueError:
        return command.split()


def is_foreign(flag: str) -> bool:
    """Whether a flag is another server's, or is a key of services here."""
    return flag in ALIASES or flag in HINTS or _is_model_flag(flag)


def number_or_text(value: Any) -> Any:
    """Numeric text as a number, so that YAML has it without quotes."""
    if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
        return int(value)
    return float(value) if isinstance(value, str) and re.fullmatch(r"-?\d*\.\d+", value) else value


def _is_model_flag(flag: str) -> bool:
    return flag in _FLAGS and _FLAGS[flag].key.startswith(_SERVICES)


def _put(place: dict[str, Any], path: str, value: Any) -> None:
    *sections, key = path.split(".")
    for section in sections:
        place = place.setdefault(section, {})
    place[key] = value
