"""Hardware detection: the devices of this machine, their memory, and the links between them.

Queries drivers and the operating system. ``config`` reads and writes topology files.
"""

from shoal.place.topology.detect import detect
from shoal.place.topology.machine import has_nvidia_driver
from shoal.place.topology.nvml import load_nvml
from shoal.place.topology.topology import Topology

__all__ = ["Topology", "detect", "has_nvidia_driver", "load_nvml"]
