"""Topology files: reading, writing, and errors."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypothesis_profiles import examples
from shoal.config.topology import format_topology, parse_topology, read_topology
from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device, Link
from shoal.place.topology import Topology

TEXT = """\
devices:
  - {name: a, kind: h200, host: one, memory: 141GiB}
  - {name: b, kind: h200, host: one, memory: 141GiB}
  - {name: c, kind: mine, host: two, memory: 512MB}
links:
  host: {bandwidth: 25GB, latency: 10us}
  network: {bandwidth: 1.25GB, latency: 50us}
  pairs:
    - {devices: [a, b], bandwidth: 450GB, latency: 5us}
speeds: {mine: 900GB}
"""


def test_a_topology_file_becomes_a_cluster(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(TEXT)
    found = read_topology(tmp_path / "cluster.yaml")
    a, b, c = found.cluster.devices
    assert (a.kind, a.host, a.memory_bytes, c.memory_bytes) == ("h200", "one", 141 * 2**30, 512 * 10**6)
    cluster = found.cluster
    links = [cluster.link(a, b), cluster.host_link, cluster.link(a, c)]
    assert [link.bytes_per_s for link in links] == [450e9, 25e9, 1.25e9]
    assert [link.latency_s for link in links] == pytest.approx([5e-6, 10e-6, 50e-6])
    assert found.bytes_per_s == {"mine": 900e9}


odd = st.sampled_from(
    ["null", "no", "1e3", "~", "a: b", "# c", "{x}", " padded ", 'quo"te', "日本", "tab\t", "😀"]
)
words = st.text("abc-_.09", min_size=1, max_size=5) | odd
links = st.builds(Link, st.integers(1, 10**13).map(float), st.integers(0, 10**9).map(lambda ns: ns / 1e9))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    devices = [
        Device(name=name, kind=draw(words), host=draw(words), memory_bytes=draw(st.integers(1, 10**13)))
        for name in draw(st.lists(words, min_size=1, max_size=4, unique=True))
    ]
    every = [frozenset((a.name, b.name)) for a in devices for b in devices if a.name < b.name]
    pairs = {pair: draw(links) for pair in every if draw(st.booleans())}
    cluster = ClusterSpec(devices=devices, host_link=draw(links), network=draw(links), pairs=pairs)
    return Topology(cluster, draw(st.dictionaries(words, st.integers(1, 10**13).map(float), max_size=2)))


@given(topologies())
@settings(max_examples=examples(100))
def test_written_topologies_are_read_back(topology: Topology) -> None:
    again = parse_topology(format_topology(topology), "x")
    assert tuple(again.cluster.devices) == tuple(topology.cluster.devices)
    assert again.bytes_per_s == topology.bytes_per_s
    ours, theirs = topology.cluster, again.cluster
    assert set(theirs.pairs) == set(ours.pairs)
    both = [(ours.host_link, theirs.host_link), (ours.network, theirs.network)]
    for one, other in [*both, *((link, theirs.pairs[pair]) for pair, link in ours.pairs.items())]:
        assert other.bytes_per_s == one.bytes_per_s
        assert other.latency_s == pytest.approx(one.latency_s, abs=1e-10)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("name: b", "name: a", r"line 3: devices\[1\].name: there is already a device named 'a'"),
        ("[a, b]", "[a, x]", r"line 9: links.pairs\[0\].devices: there is no device 'x'; there are a, b, c"),
        ("[a, b]", "[a, a]", r"line 9: links.pairs\[0\].devices: name two devices"),
        ("[a, b]", "[a]", "name two devices"),
        (
            "speeds:",
            "    - {devices: [b, a], bandwidth: 1GB, latency: 5us}\nspeeds:",
            "b and a is already given",
        ),
        ("141GiB}", "much}", r"line 2: devices\[0\].memory: expected a size such as 512MB"),
        ("bandwidth: 25GB, ", "", r"links.host.bandwidth: missing"),
        ("bandwidth: 25GB", "bandwidth: 0", r"line 6: links.host.bandwidth: must be more than 0"),
        ("latency: 10us", "latency: soon", r"line 6: links.host.latency: expected a time"),
        ("host: one", "hots: one", r"line 2: devices\[0\].hots: unknown key, did you mean 'host'"),
        ("mine: 900GB", "mine: fast", r"line 10: speeds.mine: expected bytes per second"),
        ("speeds", "speed", r"line 10: speed: unknown key, did you mean 'speeds'"),
    ],
)
def test_mistakes_are_told_with_their_line(old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_topology(TEXT.replace(old, new, 1), "cluster.yaml")


def test_a_topology_file_needs_devices() -> None:
    with pytest.raises(ConfigError, match="devices: name at least one device"):
        parse_topology("devices: []\n" + TEXT[TEXT.index("links:") :].split("  pairs")[0], "x")


def test_the_example_in_the_documentation_is_read() -> None:
    page = Path(__file__).parents[2] / "docs" / "device-maps.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    found = parse_topology(block, page.name)
    assert set(found.speeds()) == {"h200", "mine"}
    assert len(found.cluster.hosts()) == 2
