"""API keys of the HTTP server: permissions and limits of each, read from a configuration or a key file."""

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.config.sections import Rules, Section, section_of
from shoal.config.setting_tree import Node, Scalar, Table, problem, read_yaml
from shoal.config.value_kinds import Maybe, ScalarKind, Several, Text, integer, number
from shoal.core import ConfigError

_MAX_NAME_CHARACTERS = 64
_UNEXPANDED = re.compile(
    r"[$#%~]\{.*\}|\{\{.*\}\}|\$\(\w+\)|^\$[A-Za-z_]\w*\$?$|^%\w+%$|^(os\.)?environ[/.[].*$"
    r"|^\$?env:\w+$|^(process\.)?env\.\w+$|^ENV\[.*\]$|^\[\[.*\]\]$|^<.*>$|^[a-z][a-z+]*://|^secretref:"
)
"""Variable syntax of shells, Compose, Kubernetes, templates, vaults and servers; placeholders of manuals."""
_QUOTES = "\"'"


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A key that clients send as ``Authorization: Bearer``, with its permissions and limits."""

    key: str = field(repr=False)
    name: str = ""
    """Its name in the log."""
    services: tuple[str, ...] | None = None
    """Services that it gives access to; None: all."""
    requests_per_minute: int | None = None
    """None: no limit."""
    tokens_per_minute: int | None = None
    """Of prompts and outputs; None: no limit."""
    share: float = 1.0
    """Weight of its requests with the order ``fair``."""

    def __post_init__(self) -> None:
        # Errors never quote the key.
        if wrong := secret_problem(self.key):
            raise ConfigError(wrong)
        if not 0 < self.share < math.inf:
            raise ConfigError(f"a share must be more than 0, got {self.share}")
        if len(self.name) > _MAX_NAME_CHARACTERS or not self.name.isprintable() or " " in self.name:
            raise ConfigError(f"a key's name has at most {_MAX_NAME_CHARACTERS} characters and no spaces")


@dataclass(frozen=True, slots=True)
class ApiKeySection(Section):
    """Reads a key with its name and limits, or a key alone as plain text."""

    def read(self, node: Node, path: str) -> ApiKey:
        if isinstance(node, Scalar) and node.text is not None:
            node = Table({"key": node}, node.where, {"key": node.where})
        return self.build(self.read_fields(node, path), node, path)  # type: ignore[no-any-return]


def secret_problem(text: str) -> str:
    """Why ``text`` cannot be a key in a header; "": it can. The text is not quoted."""
    if not text:
        return "a key must be visible ASCII characters, and this one is empty"
    if _UNEXPANDED.search(text):
        return (
            "this is a variable that was not expanded, and no key: neither files nor flags expand any; write "
            "the key itself, or set SHOAL_API_KEY or SHOAL_ADMIN_KEY"
        )
    if text[0] in _QUOTES and text[-1] == text[0]:
        return (
            "the quotes are part of this key, as in a file for docker run --env-file; write it without them"
        )
    if not all("!" <= character <= "~" for character in text):
        return "a key must be visible ASCII characters without spaces"
    return ""


class Secret(ScalarKind):
    """A secret key; errors do not show it."""

    label = "text"
    expected = "a key"

    def parse(self, text: str) -> str:
        if wrong := secret_problem(text):
            raise ValueError(wrong)
        return text

    def show(self, value: object) -> str:
        """A placeholder, as keys are not shown."""
        return "..."


def api_key_section() -> ApiKeySection:
    rules: Rules = {
        (ApiKey, "key"): Secret(),
        (ApiKey, "requests_per_minute"): Maybe(integer(1)),
        (ApiKey, "tokens_per_minute"): Maybe(integer(1)),
        (ApiKey, "share"): number(above=0),
    }
    keys = section_of(ApiKey, rules).keys
    shown = tuple(replace(key, default="`key-1` and so on") if key.name == "name" else key for key in keys)
    return ApiKeySection(ApiKey, shown)


@dataclass(frozen=True, slots=True)
class KeyFile:
    """Reads the path of a YAML file with ``api_keys``, as in a configuration."""

    folder: Path
    """Base of relative paths."""
    label: str = "path"

    def read(self, node: Node, path: str) -> tuple[ApiKey, ...]:
        file = (self.folder / Path(Text().read(node, path)).expanduser()).resolve()
        table = read_yaml(file)
        if tuple(table.entries) != ("api_keys",):
            raise problem(table.where, path, "the file of keys must have the key api_keys and no other")
        keys: tuple[ApiKey, ...] = Several(api_key_section()).read(table.entries["api_keys"], "api_keys")
        if not keys:
            raise problem(table.where, "api_keys", "the file has no key, which would let everybody in")
        return keys

    def show(self, value: object) -> str:
        """A placeholder, as keys are not shown."""
        return "..."


@dataclass(frozen=True, slots=True)
class SecretFile:
    """Reads the path of a file that has only a key."""

    folder: Path
    """Base of relative paths."""
    label: str = "path"

    def read(self, node: Node, path: str) -> str:
        """The key, without surrounding white space."""
        file = (self.folder / Path(Text().read(node, path)).expanduser()).resolve()
        try:
            secret = file.read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is no UTF-8 text"
            raise problem(node.where, path, f"cannot read the key file {file}: {reason}") from None
        if wrong := secret_problem(secret):
            raise problem(node.where, path, f"{file}: {wrong}")
        return secret

    def show(self, value: object) -> str:
        """A placeholder, as keys are not shown."""
        return "..."


def named_keys(keys: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
    """The keys, each with a name; raises ConfigError for duplicate names or keys."""
    named = tuple(replace(key, name=key.name or f"key-{number}") for number, key in enumerate(keys, start=1))
    names: dict[str, str] = {}  # by key
    for key in named:
        if key.key in names:
            raise ConfigError(f"server.api_keys: {names[key.key]!r} and {key.name!r} are the same key")
        if key.name in names.values():
            raise ConfigError(f"server.api_keys: two keys are called {key.name!r}")
        names[key.key] = key.name
    return named


def check_key_services(keys: Iterable[ApiKey], services: Collection[str]) -> None:
    """Raise ConfigError if a key names a service that is not among ``services``."""
    for key in keys:
        for service in key.services or ():
            if service not in services:
                raise ConfigError(
                    f"server.api_keys: {key.name!r} names the service {service!r}, "
                    f"which is not served; there are {', '.join(services)}"
                )
