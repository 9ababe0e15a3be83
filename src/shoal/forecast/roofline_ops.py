"""Roofline time of one kernel or all-reduce: work divided by peak rates and measured efficiencies.

Every kernel has a start time, a compute time and a memory time. The last two overlap imperfectly: the norm
(compute^q + memory^q)^(1/q) lies between their sum (q = 1) and the roofline's maximum (q = infinity); the
power q is fitted.
"""

from dataclasses import dataclass

from shoal.core import ConfigError


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Efficiency of one kind of kernel on a device; raises ConfigError for numbers out of range."""

    compute: float
    """Share of the peak arithmetic rate that large kernels reach, in (0, 1]."""
    memory: float
    """Share of the memory bandwidth that large kernels reach, in (0, 1]."""
    start_s: float
    overlap: float = 1.0
    """The power q: 1 adds the two times, a large number takes the maximum."""
    row_s: float = 0.0
    """Seconds per sequence of a batch."""

    def __post_init__(self) -> None:
        if not (0 < self.compute <= 1 and 0 < self.memory <= 1 and self.overlap >= 1):
            raise ConfigError(f"efficiencies must be in (0, 1] and overlap at least 1, got {self}")

    def seconds(self, flops: float, moved: float, peak: float, bandwidth: float) -> float:
        """Seconds of one kernel with ``flops`` operations and ``moved`` bytes of memory traffic."""
        compute = flops / (peak * self.compute)
        memory = moved / (bandwidth * self.memory)
        longer, shorter = (compute, memory) if compute > memory else (memory, compute)
        if longer <= 0:
            return self.start_s
        # Equal to the norm, without overflow or underflow of the powers.
        together = longer * (1.0 + (shorter / longer) ** self.overlap) ** (1.0 / self.overlap)
        return self.start_s + float(together)


@dataclass(frozen=True, slots=True)
class Link:
    """The interconnect of one tensor-parallel group."""

    bandwidth: float
    """Bytes per second that each of two devices sends."""
    start_s: float
    """Seconds of the smallest reduction on two devices."""
    device_s: float = 0.0
    """Seconds per further device."""
    sharing: float = 0.0
    """Each of n devices has (2 / n)^sharing of the bandwidth: 0 with a switch, more on a shared bus."""

    def all_reduce(self, message: float, devices: int) -> float:
        """Seconds to sum ``message`` bytes over ``devices``; each sends 2 (n - 1) / n of them."""
        if devices < 2:
            return 0.0
        sent = 2 * (devices - 1) / devices * message
        bandwidth = self.bandwidth * float((2 / devices) ** self.sharing)
        return self.start_s + self.device_s * (devices - 2) + sent / bandwidth


@dataclass(frozen=True, slots=True)
class Efficiencies:
    """The efficiencies of one device, by kind of kernel."""

    matmul: Efficiency
    """Products with dense matrices."""
    prefill: Efficiency
    """Attention of prompt chunks."""
    decode: Efficiency
    """Attention of single tokens, which is bound by memory."""
    experts: Efficiency
    """Fused mixture-of-experts MLPs."""
    pointwise: Efficiency
    """Norms, rotary embedding, activations, sampling."""
