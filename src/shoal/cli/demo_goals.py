"""Latency goals of the demo's requests, relative to the time of a request alone."""

from collections.abc import Mapping

from shoal.cli.demo_prompts import CHAT, COMPLETE
from shoal.core import SLO, resolve_slo

# In a burst a request may take so many times as long as a typical one does alone. A time in seconds would be
# met or missed by the speed of the machine.
_GOALS = dict.fromkeys((CHAT, COMPLETE), SLO(e2e_scale=8))


def demo_goals(alone_s: Mapping[str, float]) -> dict[str, SLO]:
    """Goals by service, as times; only for the services in ``alone_s``.

    alone_s: time of a typical request when nothing else runs, by service.
    """
    return {name: resolve_slo(SLO(), _GOALS[name], execution_s) for name, execution_s in alone_s.items()}


def format_goals(slo: SLO) -> str:
    """Goals as text: ``TTFT 10 s, E2E 20.5 s``."""
    goals = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{name} {goal:.3g} s" for name, goal in goals if goal is not None)
