"""Which backend options name, and what is said where it cannot be used."""

import asyncio
import socket
import subprocess
import sys

import pytest

from shoal.cluster.backends.local import LocalBackend
from shoal.cluster.backends.make import make_backend
from shoal.cluster.options import ClusterOptions
from shoal.core import ConfigError

RAY = ClusterOptions(backend="ray")


def attach(address: str) -> None:
    backend = make_backend(ClusterOptions(backend="ray", address=address))
    asyncio.run(backend.attach(lambda event: None, {}))


def test_the_local_backend_is_the_default():
    assert isinstance(make_backend(ClusterOptions()), LocalBackend)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    for module in [name for name in sys.modules if name.startswith("shoal.cluster.backends.ray")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[cluster\]'"):
        make_backend(RAY)


def test_only_the_ray_backend_imports_ray():
    code = "import sys, shoal.serve.launch, shoal.cluster.backends.make; print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("address", ["6379", "ray://127.0.0.1:10001", "host:port", ":6379"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"cluster\.address must be host:port or auto"):
        attach(address)


def test_an_address_where_nothing_listens_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"cluster\.address: nothing answers at 127\.0\.0\.1:{port}"):
        attach(f"127.0.0.1:{port}")
