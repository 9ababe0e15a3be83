"""Numbers of packers that a configuration may set."""

import pytest
from packing_builders import arrival

from shoal.cluster.options import ClusterOptions, PackingOptions
from shoal.cluster.packing import (
    PACKERS,
    DeviceGroup,
    Operations,
    PackerTuning,
    Priority,
    make_packer,
    tuned_by,
)
from shoal.core import ConfigError

MELL = ("headroom", "relief", "spare", "priority")


def test_each_packer_has_its_own_numbers() -> None:
    assert {name: tuned_by(name) for name in PACKERS} == {
        "best-fit": ("headroom",),
        "worst-fit": ("headroom",),
        "load-balance": ("spare", "threshold"),
        "mell": MELL,
        "mell-eager": ("headroom", "priority"),
        "mell-literal": ("headroom", "priority"),
        "mell-forecast": MELL,
    }


@pytest.mark.parametrize(("headroom", "groups"), [(None, 1), (0.0, 1), (0.3, 2)])
def test_the_headroom_decides_what_still_fits(headroom: float | None, groups: int) -> None:
    """Two requests of 45% share a group with 5% or nothing left, not with 30%."""
    packer = make_packer("mell", PackerTuning(headroom=headroom))
    for name in ("x", "y"):
        packer.packing.open(DeviceGroup(name=name, capacity=1000))
    changes = packer.apply(Operations(arrivals=[arrival("1", 450), arrival("2", 450)]))
    assert len(set(changes.placed.values())) == groups


@pytest.mark.parametrize(("threshold", "moves"), [(None, 1), (0.9, 0)])
def test_the_threshold_decides_what_is_balanced(threshold: float | None, moves: int) -> None:
    packer = make_packer("load-balance", PackerTuning(threshold=threshold))
    for name in ("x", "y"):
        packer.packing.open(DeviceGroup(name=name, capacity=1000))
    for request, group in (("1", "x"), ("2", "x"), ("3", "y")):
        packer.admit(arrival(request, 300 if group == "x" else 10), group)
    assert len(packer.apply(Operations()).migrations) == moves


def test_a_number_of_another_packer_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match=r"packing.threshold is not a number of mell: it has headroom, relief"
    ):
        ClusterOptions(dispatch="mell", packing=PackingOptions(tuning=PackerTuning(threshold=0.1)))
    with pytest.raises(ConfigError, match=r"packing.priority is not a number of load-balance"):
        make_packer("load-balance", PackerTuning(priority=Priority(idle=2)))
    # A dispatch policy that packs nothing does not read them.
    ClusterOptions(packing=PackingOptions(tuning=PackerTuning(threshold=0.1)))


@pytest.mark.parametrize("name", ["headroom", "relief", "spare", "threshold"])
def test_shares_are_below_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"packing.{name} must be in \[0, 1\), got 1"):
        PackerTuning(**{name: 1.0})
