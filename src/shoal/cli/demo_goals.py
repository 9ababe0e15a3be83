"""The demo's yardstick and goals: how long a request takes alone, and how long it may take among others."""

from collections.abc import Mapping

from shoal.cli.demo_prompts import CHAT, COMPLETE
from shoal.core import SLO, resolve_slo

# Somebody waits for the first words of a chat; both kinds of answers may take five times as long as alone.
_GOALS = {CHAT: SLO(ttft_s=10, e2e_scale=5), COMPLETE: SLO(e2e_scale=5)}


def demo_goals(alone: Mapping[str, float]) -> dict[str, SLO]:
    """Goals by service, as times; only of services whose request alone was timed.

    alone: seconds that a typical request of the service takes when nothing else runs.
    """
    return {name: resolve_slo(SLO(), _GOALS[name], execution_s) for name, execution_s in alone.items()}


def goal_words(slo: SLO) -> str:
    """Goals as people read them: ``TTFT 10 s, E2E 20.5 s``."""
    goals = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    return ", ".join(f"{name} {goal:.3g} s" for name, goal in goals if goal is not None)
