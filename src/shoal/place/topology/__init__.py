"""What this machine has: devices, their memory, and the links between them.

Here belongs what asks drivers and the operating system, and the description that comes of it. Reading and
writing the description is ``config``'s; what is put on the devices is ``cluster.place``'s.
"""

from shoal.place.topology.detect import detect
from shoal.place.topology.machine import has_nvidia_driver
from shoal.place.topology.nvml import load_nvml
from shoal.place.topology.topology import Topology

__all__ = ["Topology", "detect", "has_nvidia_driver", "load_nvml"]
