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
        ("api_keys: ['my secret']", "visible ASCII"),
        ("api_keys: [sécret]", "visible ASCII"),
        ("api_keys: [{key: a, name: a b}]", "no spaces"),
        ("api_keys: [secret, secret]", "'key-1' and 'key-2' are the same key"),
        ("keys: [a]", "must have the key api_keys and no other"),
        ("[a]", "expected keys and values"),
    ],
)
def test_mistakes_name_their_place_and_no_key(tmp_path, text, message):
    (tmp_path / "keys.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        server(tmp_path, "server: {api_key_file: keys.yaml}")
    assert "secret" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*no\.yaml"):
        server(tmp_path, "server: {api_key_file: no.yaml}")
