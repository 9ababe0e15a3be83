"""Objects in the bodies of several endpoints: stream_options, slo and usage."""

from typing import Annotated

from pydantic import Field

from shoal.core import SLO
from shoal.core.slo import LARGEST_SCALE, LONGEST_GOAL_S
from shoal.serve.strict_model import StrictModel

Seconds = Annotated[float, Field(gt=0, le=LONGEST_GOAL_S)]


class StreamOptions(StrictModel):
    """How to stream."""

    include_usage: bool | None = None
    """Send the token counts in a last chunk."""
    continuous_usage_stats: bool | None = None
    """With include_usage: also send the counts of each choice so far in every chunk."""
    include_obfuscation: bool | None = None
    """Ignored."""


class Goals(StrictModel):
    """Latency goals in seconds."""

    limits_output = True

    ttft: Seconds | None = None
    """Arrival to the first token."""
    tpot: Seconds | None = None
    """Mean time per output token after the first."""
    mtpot: Seconds | None = None
    """Longest time between two tokens."""
    e2e: Seconds | None = None
    """Arrival to the last token."""
    e2e_scale: Annotated[float, Field(gt=0, le=LARGEST_SCALE)] | None = None
    """e2e as a multiple of the service's execution time, which must be configured. A request with e2e or
    e2e_scale overrides both of the service."""

    def slo(self) -> SLO:
        return SLO(
            ttft_s=self.ttft,
            tpot_s=self.tpot,
            mtpot_s=self.mtpot,
            e2e_s=self.e2e,
            e2e_scale=self.e2e_scale,
        )


class UsageOptions(StrictModel):
    """What OpenRouter's clients ask of token counts."""

    include: bool | None = None
    """As stream_options.include_usage, for streams; other answers have them always."""
