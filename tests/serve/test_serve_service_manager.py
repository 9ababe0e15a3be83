"""What a server tells the service manager at ``NOTIFY_SOCKET``."""

import asyncio
import re
import signal
import socket
import uuid

import pytest
from test_serve_launch import end, launch

from shoal.serve.service_manager import ServiceManager


class Listener:
    """The datagram socket of a service manager."""

    def __init__(self, address):
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(60)

    def message(self):
        lines = self.socket.recv(65536).decode().split("\n")
        return dict(line.split("=", 1) for line in lines)

    def until(self, key):
        """All messages up to the first that has ``key``."""
        found = [self.message()]
        while key not in found[-1]:
            found.append(self.message())
        return found


@pytest.fixture
def listener(tmp_path):
    listener = Listener(str(tmp_path / "notify"))
    with listener.socket:
        yield listener


def manager(address, extension_s=180.0):
    return ServiceManager({"NOTIFY_SOCKET": address}, extension_s=extension_s)


def test_each_report_is_one_message(listener):
    notified = manager(listener.address)
    notified.starting("smollm2: 40%")
    assert listener.message() == {"STATUS": "smollm2: 40%", "EXTEND_TIMEOUT_USEC": "180000000"}
    notified.extend()
    assert listener.message() == {"EXTEND_TIMEOUT_USEC": "180000000"}
    notified.ready("http://127.0.0.1:8000")
    assert listener.message() == {"READY": "1", "STATUS": "ready at http://127.0.0.1:8000"}
    notified.stopping()
    assert listener.message() == {"STOPPING": "1", "STATUS": "stopping"}


def test_a_socket_may_have_an_abstract_name():
    listener = Listener(f"@shoal-test-{uuid.uuid4()}")
    with listener.socket:
        manager(listener.address).extend()
        assert listener.message() == {"EXTEND_TIMEOUT_USEC": "180000000"}


def test_a_status_cannot_set_anything_else(listener):
    manager(listener.address).starting("a model\nREADY=1")
    assert listener.message()["STATUS"] == "a model READY=1"


def test_a_time_without_end_is_a_day(listener):
    manager(listener.address, float("inf")).extend()
    assert listener.message() == {"EXTEND_TIMEOUT_USEC": str(86_400 * 10**6)}


def test_nothing_is_sent_without_a_socket(caplog):
    ServiceManager({}, extension_s=1.0).ready("url")
    assert not caplog.records


@pytest.mark.parametrize("address", ["/no/such/socket", "/" + "a" * 200, "vsock:2:1234", "/a\0b", "@"])
def test_a_service_manager_that_cannot_be_reached_is_logged_and_left_alone(address, caplog):
    manager(address).ready("url")
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_service_manager_that_does_not_read_does_not_block_the_server(listener, caplog, monkeypatch):
    monkeypatch.setattr("shoal.serve.service_manager._SEND_TIMEOUT_S", 0.01)
    notified = manager(listener.address)
    while not caplog.records:
        notified.extend()
    assert "timed out" in caplog.text


def test_a_server_reports_its_start_and_its_end(listener, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)

    async def main():
        process, url = await launch("fake")
        *start, ready = listener.until("READY")
        assert ready == {"READY": "1", "STATUS": f"ready at {url}"}
        # The default of cluster.load_timeout, and a minute.
        assert {message["EXTEND_TIMEOUT_USEC"] for message in start} == {"180000000"}
        assert any(re.search(r"\w", message.get("STATUS", "")) for message in start)
        assert await end(process, signal.SIGTERM) == ["ended"]
        assert listener.until("STOPPING")[-1]["STOPPING"] == "1"

    asyncio.run(main())


def test_a_stop_while_loading_is_reported(listener, monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", listener.address)

    async def main():
        process, _ = await launch("endless")
        await end(process, signal.SIGTERM)
        reported = listener.until("STOPPING")
        assert not any("READY" in message for message in reported)

    asyncio.run(main())
