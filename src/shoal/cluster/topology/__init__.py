"""What this machine has: devices, their memory, and the links between them.

Here belongs what asks drivers and the operating system, and the description that comes of it. Reading and
writing the description is ``config``'s; what is put on the devices is ``cluster.place``'s.
"""

from shoal.cluster.topology.detect import detect
from shoal.cluster.topology.machine import has_nvidia_driver
from shoal.cluster.topology.nvml import load_nvml
from shoal.cluster.topology.topology import Topology

__all__ = ["Topology", "detect", "has_nvidia_driver", "load_nvml"]
