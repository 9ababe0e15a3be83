"""The Host header: web pages must not reach a server that listens on loopback."""

import asyncio

import httpx
import pytest
from serve_builders import FakeEngine, completion, serving

from shoal.serve.http.allowed_hosts import allowed_hosts


def statuses(hosts, **options):
    async def main():
        async with serving(FakeEngine(), **options) as (url, _, _), httpx.AsyncClient(base_url=url) as client:
            responses = [
                await client.post("/v1/completions", json=completion(), headers={"Host": host})
                for host in hosts
            ]
        refused = [response.json()["error"] for response in responses if response.status_code != 200]
        assert all(error["code"] == "host_not_allowed" for error in refused)
        assert all("server.allowed_hosts" in error["message"] for error in refused)
        return [response.status_code for response in responses]

    return asyncio.run(main())


OURS = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:8000", "localhost."]
FOREIGN = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost:evil", "", "x" * 5000]


def test_on_loopback_only_loopback_names_are_allowed():
    assert statuses(OURS) == [200] * len(OURS)
    assert statuses(FOREIGN) == [403] * len(FOREIGN)
    assert statuses(["127.0.0.2:80", "evil.example"], host="127.0.0.2") == [200, 403]


def test_a_list_of_hosts_replaces_the_default():
    assert statuses(["llm.example:443", "localhost"], allowed_hosts=("LLM.example",)) == [200, 403]
    assert statuses(FOREIGN, allowed_hosts=("*",)) == [200] * len(FOREIGN)


def test_a_request_without_a_host_is_allowed():
    async def main():
        async with serving(FakeEngine()) as (url, _, _):
            host, _, port = url.removeprefix("http://").rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            assert (await reader.read()).split()[1] == b"200"
            writer.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("bound", "address"), [("0.0.0.0", "0.0.0.0"), ("::", "::"), ("box.lan", "192.168.0.7")]
)
def test_other_addresses_allow_any_name(bound, address):
    assert allowed_hosts(None, bound, address) is None
    assert allowed_hosts(("a",), bound, address) == {"a"}
