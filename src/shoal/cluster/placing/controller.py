"""Decides at the end of an interval whether the placement changes, and how long the next one is; pure.

Used by the running cluster and by simulations of it.
"""

from dataclasses import dataclass

from shoal.place.estimate import Estimate
from shoal.place.re_placement import Hysteresis, IntervalRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was decided at the end of an interval."""

    changes: bool
    """Whether to change to the placement that was found."""
    why: str
    interval_s: float
    """Length of the next interval."""
    estimated: Estimate | None
    """Of the interval that ended, before it began; None: it is the first."""
    achieved: Estimate | None
    """Of the requests that ended in it; None: it was not needed."""
    present: Estimate | None = None
    """Of the present placement, for the requests of the interval."""
    found: Estimate | None = None
    """Of the placement that was found, for the same; these two are None without a search."""


class PlacementController:
    """Keeps the length of the interval, and what was estimated for it.

    hysteresis: None: always change, as in SeaLLM. estimated: of the first placement; None: not known.
    """

    def __init__(
        self, rule: IntervalRule, hysteresis: Hysteresis | None, estimated: Estimate | None = None
    ) -> None:
        self._rule = rule
        self._hysteresis = hysteresis
        self._estimated = estimated
        self.interval_s = rule.first_s
        """Length of the present interval."""

    def skip(self, why: str, achieved: Estimate | None = None) -> Decision:
        """End an interval without a search: its length stays."""
        return Decision(
            changes=False,
            why=why,
            interval_s=self.interval_s,
            estimated=self._estimated,
            achieved=achieved,
        )

    def decide(
        self, achieved: Estimate, present: Estimate, found: Estimate, *, differs: bool = True
    ) -> Decision:
        """End an interval. present, found: estimates of two placements for the requests of the interval.

        achieved: of its requests that ended. differs: whether the placement that was found is another one.
        """
        changes, why = self.judge(present, found, differs=differs)
        estimated = self._estimated
        if estimated is not None:
            self.interval_s = self._rule.next_s(self.interval_s, estimated, achieved)
        self._estimated = found if changes else present
        return Decision(
            changes=changes,
            why=why,
            interval_s=self.interval_s,
            estimated=estimated,
            achieved=achieved,
            present=present,
            found=found,
        )

    def judge(self, present: Estimate, found: Estimate, *, differs: bool) -> tuple[bool, str]:
        """Whether to change to the placement that was found, and why; arguments as for ``decide``."""
        if not differs:
            return False, "the present placement is best"
        gains = (
            f"goals met {present.attainment:.1%} -> {found.attainment:.1%}, "
            f"normalised latency {present.normalised_latency:.2f} -> {found.normalised_latency:.2f}"
        )
        if self._hysteresis is None or self._hysteresis.worthwhile(present, found):
            return True, gains
        return False, f"too little gain: {gains}"
