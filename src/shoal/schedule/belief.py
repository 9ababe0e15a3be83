"""Which output lengths an admission believes in, and what follows for memory."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from shoal.forecast import LengthDistribution
from shoal.schedule.members import IntArray
from shoal.schedule.tracked import Tracked

if TYPE_CHECKING:
    from shoal.schedule.crowd import Crowd


class Belief(Protocol):
    """Which output lengths somebody believes in; one object says the same of the same crowd whenever asked.

    What is believed of a request must not depend on the others in the crowd. Then one more request costs
    little where the crowd without it has been forecast already.
    """

    def lengths(self, crowd: "Crowd") -> IntArray:
        """Of all requests in a crowd [draws, n]."""
        ...

    def length_of(self, one: Tracked, lengths: LengthDistribution) -> Sequence[int]:
        """Of one request alone [draws], where ``lengths`` is what is believed in its crowd."""
        ...


class Bounds(NamedTuple):
    """Between which numbers the most blocks held at once lie, for each draw."""

    low: Sequence[int]
    high: Sequence[int]
