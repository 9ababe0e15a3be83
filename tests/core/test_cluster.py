"""Devices and links of a cluster."""

import pytest

from shoal.core import ConfigError
from shoal.core.cluster import ClusterSpec, Device, Link

FAST, SLOW, BRIDGE = Link(64e9, 1e-6), Link(1e9, 1e-4), Link(300e9, 1e-6)


def device(name: str, host: str = "h") -> Device:
    return Device(name=name, kind="cpu", host=host, memory_bytes=1)


def test_a_pair_has_its_own_link_or_the_host_link_or_the_network() -> None:
    a, b, c, d = device("a"), device("b"), device("c"), device("d", "other")
    pairs = {frozenset("ab"): BRIDGE}
    cluster = ClusterSpec(devices=[a, b, c, d], host_link=FAST, network=SLOW, pairs=pairs)
    assert cluster.link(a, b) == cluster.link(b, a) == BRIDGE
    assert cluster.link(a, c) == FAST
    assert cluster.link(c, d) == SLOW
    assert cluster.hosts() == {"h": [a, b, c], "other": [d]}


@pytest.mark.parametrize(
    ("names", "pair"), [((), None), (("a", "a"), None), (("a", "b"), "ax"), (("a", "b"), "a")]
)
def test_invalid_clusters_are_refused(names: tuple[str, ...], pair: str | None) -> None:
    pairs = {} if pair is None else {frozenset(pair): FAST}
    with pytest.raises(ConfigError):
        ClusterSpec(devices=[device(name) for name in names], host_link=FAST, network=SLOW, pairs=pairs)


def test_a_link_needs_bandwidth() -> None:
    with pytest.raises(ConfigError):
        Link(0, 1e-6)
    with pytest.raises(ConfigError):
        Link(1e9, -1)
