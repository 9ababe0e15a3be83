"""The exposure that a server reports at its start."""

import asyncio
import io
import re

import pytest
from rich.console import Console
from serve_builders import FakeEngine, serving

from shoal.cli.start_summary import print_access
from shoal.config.api_keys import ApiKey
from shoal.serve.http.exposure import exposure, warnings
from shoal.serve.options import ServerOptions

KEYS = (ApiKey(key="sk-alice"), ApiKey(key="sk-bob"))


@pytest.mark.parametrize(
    ("options", "address", "models", "operators"),
    [
        ({}, "127.0.0.1", "this machine, and whom a proxy", "programs on this machine, and a proxy"),
        ({}, "::1", "this machine, and whom a proxy", "programs on this machine, and a proxy"),
        ({}, "0.0.0.0", "everybody who reaches it, without a key", "programs on this machine, and a proxy"),
        ({"api_keys": KEYS}, "127.0.0.1", "holders of an API key (2)", "nobody"),
        ({"api_key_file": KEYS}, "0.0.0.0", "holders of an API key (2)", "nobody"),
        ({"admin_key": "k"}, "::", "everybody", "the holder of the admin key"),
        ({"admin_key_file": "k", "api_keys": KEYS}, "10.0.0.7", "holders", "the holder of the admin key"),
    ],
)
def test_exposure_of_models_and_operators_routes(options, address, models, operators):
    told = exposure(ServerOptions(**options), address)
    assert told["models"].startswith(models)
    assert told["/admin"].startswith(operators)
    assert len(told) == 3
    out = io.StringIO()
    print_access(told, Console(file=out, width=400))
    assert [line.split(":")[0].split(maxsplit=1) for line in out.getvalue().splitlines()] == [
        ["open", name] for name in told
    ]


@pytest.mark.parametrize(
    ("options", "address", "named"),
    [
        ({}, "127.0.0.1", []),
        ({}, "::1", []),
        ({"host": "0.0.0.0"}, "0.0.0.0", ["server.host 0.0.0.0"]),
        ({"host": "::"}, "::", ["server.host ::"]),
        ({"host": "box.lan"}, "192.168.0.7", ["server.host box.lan"]),
        ({"host": "0.0.0.0", "admin_key": "k"}, "0.0.0.0", ["server.host 0.0.0.0"]),
        ({"allowed_hosts": ("*",)}, "127.0.0.1", ["server.allowed_hosts *"]),
        ({"allowed_hosts": ("llm.example",)}, "127.0.0.1", []),
        ({"cors_origins": ("*",)}, "127.0.0.1", ["server.cors_origins *"]),
        ({"cors_origins": ("https://a.org",)}, "127.0.0.1", []),
        (
            {"host": "0.0.0.0", "cors_origins": ("*",), "allowed_hosts": ("*",), "api_keys": KEYS},
            "0.0.0.0",
            [],
        ),
    ],
)
def test_exposure_without_keys_is_warned_of(options, address, named):
    found = warnings(ServerOptions(**options), address)
    assert [text.partition(" without API keys")[0] for text in found] == named
    assert all("SHOAL_API_KEY" in text for text in found)


@pytest.mark.parametrize("keys", [(), KEYS])
def test_the_warning_is_logged_at_the_start(keys, capsys):
    async def main():
        async with serving(FakeEngine(), host="0.0.0.0", api_keys=keys):
            pass

    asyncio.run(main())
    assert bool(re.search(r"WARNING: +server.host 0.0.0.0", capsys.readouterr().err)) == (not keys)
