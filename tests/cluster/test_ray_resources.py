"""What engines of each device need of a Ray node."""

from pathlib import Path

import pytest

from shoal.cluster.backends.ray.resources import ResourceNeeds, resource_needs
from shoal.core import Service
from shoal.engine import EngineOptions
from shoal.engine.process.child_process import BUILDER
from shoal.engine.process.config import EngineConfig
from simulated_engines import simulated_options

SERVICES = (Service(name="a", model="a"),)


def config(options: EngineOptions) -> EngineConfig:
    return EngineConfig(options=options, folders={"a": Path("a")}, builder=BUILDER, heartbeat_s=1.0)


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 0), ("cuda:0", 1), ("cuda:3", 1)])
def test_an_engine_needs_a_gpu_if_it_runs_on_one(device, gpus):
    options = EngineOptions(services=SERVICES, device=device, threads=3)
    assert resource_needs(config(options)) == ResourceNeeds(3, gpus)


def test_a_simulated_engine_needs_a_cpu_alone(tmp_path):
    assert resource_needs(config(simulated_options(tmp_path))) == ResourceNeeds(1, 0)
