"""What one kernel takes on a device: counted work over peak rates, times measured efficiencies.

Every kernel has a time to start, a time for its arithmetic and a time for its memory traffic. The last two
overlap imperfectly: the norm (compute^q + memory^q)^(1/q) lies between their sum (q = 1) and the roofline's
maximum (q = infinity), and its power q is fitted.
"""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """How near a kind of kernel comes to a device's peaks.

    compute, memory: shares of the peak rates that large kernels reach, in (0, 1]. start_s: seconds before
    any work is done. overlap: the power q above; 1 adds the two, large numbers take the longer. row_s: what
    each sequence of a batch adds, seconds.
    """

    compute: float
    memory: float
    start_s: float
    overlap: float = 1.0
    row_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse factors that no kernel has."""
        if not (0 < self.compute <= 1 and 0 < self.memory <= 1 and self.overlap >= 1):
            raise ConfigError(f"efficiencies must be in (0, 1] and overlap at least 1, got {self}")

    def seconds(self, flops: float, moved: float, peak: float, bandwidth: float) -> float:
        """Seconds of one kernel of ``flops`` operations that moves ``moved`` bytes."""
        compute = flops / (peak * self.compute)
        memory = moved / (bandwidth * self.memory)
        longer, shorter = (compute, memory) if compute > memory else (memory, compute)
        if longer <= 0:
            return self.start_s
        # Equal to the norm, and safe from overflow and underflow of the powers.
        together = longer * (1.0 + (shorter / longer) ** self.overlap) ** (1.0 / self.overlap)
        return self.start_s + float(together)


@dataclass(frozen=True, slots=True)
class Link:
    """Reductions between the devices of one tensor-parallel group.

    bandwidth: bytes per second that each of two devices sends. start_s: time of the smallest reduction on
    two devices; device_s: what each further device adds. sharing: n devices have (2 / n)^sharing of the
    bandwidth each; 0 where a switch connects them, more where they share a bus.
    """

    bandwidth: float
    start_s: float
    device_s: float = 0.0
    sharing: float = 0.0

    def all_reduce(self, message: float, devices: int) -> float:
        """Seconds to sum ``message`` bytes over ``devices``: each sends 2 (n - 1) / n of them."""
        if devices < 2:
            return 0.0
        sent = 2 * (devices - 1) / devices * message
        bandwidth = self.bandwidth * float((2 / devices) ** self.sharing)
        return self.start_s + self.device_s * (devices - 2) + sent / bandwidth


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The factors of one device, by kind of kernel.

    matmul: dense matrices. prefill: attention of prompt chunks. decode: attention of single tokens, whose
    arithmetic hides behind its reads. experts: fused mixture-of-experts MLPs. pointwise: norms, rotary
    embedding, activations, sampling.
    """

    matmul: Efficiency
    prefill: Efficiency
    decode: Efficiency
    experts: Efficiency
    pointwise: Efficiency
