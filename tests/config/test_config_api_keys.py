"""API keys in a configuration, in a file of their own and as flags."""

import pytest
from config_builders import settings

from shoal.config import load_config
from shoal.config.api_keys import ApiKey
from shoal.core import ConfigError
from shoal.serve.options import ServerOptions

KEYS = """\
api_keys:
  - {name: alice, key: sk-alice, services: [chat], requests_per_minute: 60}
  - sk-plain
  - {key: sk-tokens, tokens_per_minute: 1000}
"""
EXPECTED = (
    ApiKey(name="alice", key="sk-alice", services=("chat",), requests_per_minute=60),
    ApiKey(key="sk-plain"),
    ApiKey(key="sk-tokens", tokens_per_minute=1000),
)


def server(folder, text, **flags):
    file = folder / "shoal.yaml"
    file.write_text("services: [smollm2]\n" + text)
    return load_config(ServerOptions, file=file, flags=settings(**flags)).server


def test_keys_in_the_configuration(tmp_path):
    assert server(tmp_path, "server:\n  " + KEYS.replace("\n", "\n  ")).api_keys == EXPECTED


def test_keys_in_a_file_beside_it(tmp_path):
    (tmp_path / "keys.yaml").write_text(KEYS)
    options = server(tmp_path, "server: {api_key_file: keys.yaml, api_keys: [sk-more]}")
    assert options.api_key_file == EXPECTED
    assert options.named_api_keys()[0] == ApiKey(key="sk-more", name="key-1")
    assert server(tmp_path, "", api_key_file=str(tmp_path / "keys.yaml")).api_key_file == EXPECTED


def test_keys_as_flags_replace_the_list(tmp_path):
    options = server(tmp_path, "server: {api_keys: [old]}", api_key=("a", "b"))
    assert options.api_keys == (ApiKey(key="a"), ApiKey(key="b"))
    assert server(tmp_path, "server: {api_keys: [old]}", api_key=()).api_keys == (ApiKey(key="old"),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("api_keys: [{name: a}]", r"keys.yaml, line 1: api_keys\[0\].key: missing"),
        ("api_keys: [{key: a, tokens_per_min: 5}]", "unknown key, did you mean 'tokens_per_minute'"),
        ("api_keys: [{key: a, requests_per_minute: 0}]", "requests_per_minute: must be at least 1"),
        ("api_keys: [{key: a, share: 0}]", "share: must be more than 0"),
        ("api_keys: ['my secret']", "visible ASCII"),
        ("api_keys: [sécret]", "visible ASCII"),
        ("api_keys: [{key: a, name: a b}]", "no spaces"),
        ("api_keys: [secret, secret]", "'key-1' and 'key-2' are the same key"),
        ("keys: [a]", "must have the key api_keys and no other"),
        ("[a]", "expected keys and values"),
    ],
)
def test_errors_have_their_place_and_no_key(tmp_path, text, message):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        server(tmp_path, "server: {api_key_file: keys.yaml}")
    assert "secret" not in str(error.value)


def test_a_missing_key_file(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*no\.yaml"):
        server(tmp_path, "server: {api_key_file: no.yaml}")


VARIABLES = [
    "${API_KEY}", "${API_KEY:-none}", "$API_KEY", "$api_key", "$(API_KEY)", "%API_KEY%", "{{API_KEY}}",
    "${{secrets.API_KEY}}", "sk-${API_KEY}", "os.environ/API_KEY",
    "$env:API_KEY", "env:API_KEY", "process.env.API_KEY", "env.API_KEY", "ENV[API_KEY]", "#{API_KEY}",
    "%{API_KEY}", "<API_KEY>", "[[API_KEY]]", "op://vault/item", "ref+vault://path", "file:///run/key",
    "secretref:key",
]  # fmt: skip


@pytest.mark.parametrize("key", VARIABLES)
def test_an_unexpanded_variable_is_not_a_key(tmp_path, key):
    (tmp_path / "keys.yaml").write_text(f"api_keys:\n  - {{name: a, key: '{key}'}}")
    (tmp_path / "admin.key").write_text(f"{key}\n")
    for text, place in (
        (f"server: {{api_keys: ['{key}']}}", r"line 2: server.api_keys\[0\].key: "),
        (f"server:\n  admin_key: '{key}'", r"line 3: server.admin_key: "),
        ("server: {api_key_file: keys.yaml}", r"keys.yaml, line 2: api_keys\[0\].key: "),
        ("server: {admin_key_file: admin.key}", r"line 2: server.admin_key_file: .*admin.key: "),
    ):
        with pytest.raises(ConfigError, match=place + "this is a variable that was not expanded"):
            server(tmp_path, text)
    for flag, path in (("api_key", r"server.api_keys\[0\].key"), ("admin_key", "server.admin_key")):
        given = (key,) if flag == "api_key" else key
        with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: {path}: this is a variable"):
            server(tmp_path, "", **{flag: given})
    with pytest.raises(ConfigError, match="this is a variable"):
        ApiKey(key=key)


@pytest.mark.parametrize(
    "key",
    [
        "sk-$1",
        "a$b",
        "100%",
        "%",
        "$1abc",
        "{a}",
        "environ",
        "sk-(x)",
        "env:",
        "/run/a+b",
        "a<b>",
        "e:n",
    ],
)
def test_keys_with_such_characters_are_keys(tmp_path, key):
    assert server(tmp_path, f"server: {{api_keys: ['{key}']}}").api_keys == (ApiKey(key=key),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "server: {api_keys: ['']}",
            r"line 2: server.api_keys\[0\].key: a key must be .*, and this one is empty",
        ),
        ("server: {api_keys: [{key: ' '}]}", r"line 2: server.api_keys\[0\].key: .*without spaces"),
        ("server: {api_keys: [{key: [a]}]}", r"server.api_keys\[0\].key: expected a key, got a list"),
        ("server: {admin_key: ''}", "line 2: server.admin_key: .*empty"),
        ("server: {admin_key: '\"sk-a\"'}", "line 2: server.admin_key: the quotes are part of this key"),
        ("server: {admin_key: 'a b'}", "line 2: server.admin_key: .*without spaces"),
        ("server: {admin_key_file: empty}", "server.admin_key_file: .*empty: a key .*empty"),
        ("server: {admin_key_file: lines}", "server.admin_key_file: .*lines: .*without spaces"),
        (
            "server: {api_key_file: none.yaml}",
            "none.yaml: api_keys: the file has no key|none.yaml, line 1: api_keys",
        ),
        ("server: {admin_key: !env ADMIN_KEY}", "line 2: the YAML tag !env means nothing here"),
        ("server: {api_keys: [!ENV '${API_KEY}']}", "line 2: the YAML tag !ENV means nothing here"),
    ],
)
def test_errors_of_empty_keys_and_keys_with_spaces_have_their_place(tmp_path, text, message):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "lines").write_text("one\ntwo\n")
    (tmp_path / "none.yaml").write_text("api_keys: []")
    with pytest.raises(ConfigError, match=message):
        server(tmp_path, text)
