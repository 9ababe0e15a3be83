"""What Shoal believes about the future of its requests.

Here belong beliefs about output lengths and the peak of memory that follows from them; functions of
numbers, vectorised, without a clock and without state other than a window of past lengths. What is
done with a forecast (admission, eviction) is decided in rooms above.
"""

from shoal.forecast.draws import derive_seeds, uniforms
from shoal.forecast.lengths import COLD_STARTS, LengthDistribution, LengthHistory
from shoal.forecast.peak import Demand, SharedBlocks, Timeline, safe_peak

__all__ = [
    "COLD_STARTS",
    "Demand",
    "LengthDistribution",
    "LengthHistory",
    "SharedBlocks",
    "Timeline",
    "derive_seeds",
    "safe_peak",
    "uniforms",
]
