"""What is found of a machine, with a driver that is made up."""

from pathlib import Path

import psutil
import pytest
from fake_nvml import FakeGpu, FakeNvml

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.place.topology import Topology, detect, has_nvidia_driver

GB = 10**9
SWITCH, GPU = 2, 0


def gpus(count: int, name: str = "NVIDIA H200", **options: object) -> list[FakeGpu]:
    return [FakeGpu(name, 141 * GB, f"0000:{at:02x}:00.0", **options) for at in range(count)]


def link(found: Topology, first: int, second: int) -> Link:
    devices = found.cluster.devices
    return found.cluster.link(devices[first], devices[second])


@pytest.mark.parametrize("bytes_as_text", [False, True])
def test_gpus_on_switches_have_equal_links_to_all_others(bytes_as_text: bool) -> None:
    nvml = FakeNvml(gpus(4, nvlinks=[(4, SWITCH, "0000:ff:00.0")] * 18), bytes_as_text=bytes_as_text)
    found = detect(nvml, "n1")
    assert [device.name for device in found.cluster.devices] == ["n1-gpu0", "n1-gpu1", "n1-gpu2", "n1-gpu3"]
    assert {(device.kind, device.host, device.memory_bytes) for device in found.cluster.devices} == {
        ("h200", "n1", 141 * GB)
    }
    assert found.cluster.host_link.bytes_per_s == 18 * 25 * GB
    assert not found.cluster.pairs
    assert not found.bytes_per_s
    assert nvml.opened == 0


def test_bridges_join_pairs_and_pcie_the_others() -> None:
    cards = gpus(4, "NVIDIA GeForce RTX 3090")
    for first, second in ((0, 1), (1, 0)):
        cards[first].nvlinks = [(3, GPU, cards[second].bus_id)] * 4
    far = {(i, j): 40 for j in range(4) for i in range(j)}
    found = detect(FakeNvml(cards, far | {(2, 3): 10}), "n1")
    assert {device.kind for device in found.cluster.devices} == {"rtx-3090"}
    assert link(found, 0, 1).bytes_per_s == 4 * 25 * GB
    assert link(found, 2, 3) == Link(1.969e9 * 16, 10e-6)
    assert link(found, 0, 2) == link(found, 1, 3) == found.cluster.host_link == Link(1.969e9 * 16, 20e-6)
    assert len(found.cluster.pairs) == 2


def test_the_narrower_slot_says_how_fast_a_pair_is() -> None:
    cards = gpus(2)
    cards[1].pcie = (3, 8)
    found = detect(FakeNvml(cards, {(0, 1): 50}), "n1")
    assert link(found, 0, 1) == Link(0.985e9 * 8, 30e-6)
    unknown = detect(FakeNvml(cards), "n1")
    assert link(unknown, 0, 1) == Link(0.985e9 * 8, 30e-6)


def test_a_gpu_without_a_data_sheet_has_its_own_name_and_bandwidth() -> None:
    card = FakeGpu("NVIDIA Tesla X-9 (PCIe)", 10 * GB, "0000:01:00.0", bus_bits=384, memory_megahertz=9751)
    found = detect(FakeNvml([card]), "n1")
    assert found.cluster.devices[0].kind == "tesla-x-9-pcie"
    assert found.bytes_per_s == {"tesla-x-9-pcie": 2 * 9751e6 * 384 / 8}
    assert found.speeds() == found.bytes_per_s
    card.bus_bits = None
    silent = detect(FakeNvml([card]), "n1")
    assert not silent.bytes_per_s
    with pytest.raises(ConfigError, match=r"'tesla-x-9-pcie'.*speeds: \{tesla-x-9-pcie: 900GB\}.*h200"):
        silent.speeds()


@pytest.mark.parametrize("nvml", [None, FakeNvml([], driver=False), FakeNvml([])])
def test_a_machine_without_gpus_has_its_processors(nvml: FakeNvml | None, tmp_path: Path) -> None:
    whole = detect(nvml, "n1", tmp_path)
    assert [(one.name, one.memory_bytes) for one in whole.cluster.devices] == [
        ("n1-cpu0", psutil.virtual_memory().total)
    ]
    third = psutil.virtual_memory().total // 1024 // 3
    for node, kilobytes in ((0, third), (1, 2 * third), (2, 0)):
        folder = tmp_path / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "meminfo").write_text(
            f"Node {node} MemTotal:       {kilobytes} kB\nNode {node} MemFree: 1 kB\n"
        )
    nodes = detect(nvml, "n1", tmp_path)
    assert [(one.name, one.kind, one.memory_bytes) for one in nodes.cluster.devices] == [
        ("n1-cpu0", "cpu", 1024 * third),
        ("n1-cpu1", "cpu", 2048 * third),
    ]
    # Memory that was added later is in no node.
    (tmp_path / "sys/devices/system/node/node1/meminfo").write_text("Node 1 MemTotal: 1 kB\n")
    assert [one.name for one in detect(nvml, "n1", tmp_path).cluster.devices] == ["n1-cpu0"]
    assert nodes.speeds()["cpu"] > 0


def test_a_driver_without_its_module_is_noticed(tmp_path: Path) -> None:
    assert not has_nvidia_driver(tmp_path)
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").touch()
    assert has_nvidia_driver(tmp_path)


def test_speeds_come_from_data_sheets_and_what_is_written_goes_first() -> None:
    devices = [Device(name=kind, kind=kind, host="h", memory_bytes=GB) for kind in ("h200", "a800", "mine")]
    cluster = ClusterSpec(devices=devices, host_link=Link(GB, 0), network=Link(GB, 0))
    speeds = Topology(cluster, {"mine": 5.0, "a800": 6.0}).speeds()
    assert (speeds["mine"], speeds["a800"]) == (5.0, 6.0)
    assert 3000 * GB < speeds["h200"] < 4800 * GB
