"""What placing services anew brings while their popularity changes (SeaLLM, section 4.3 and Fig. 8)."""

from experiments.parallel import at_each
from experiments.pictures import lines
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.seallm.changing import REPLACES, Run, measure
from experiments.seallm.end_to_end import ASSUMPTIONS, DEVICES
from experiments.seallm.points import PAPER
from experiments.seallm.services import Traffic
from shoal.place.replacement import IntervalRule

NAME = "seallm-replacement"
PHASE_S, QUICK_PHASE_S = 60.0, 6.0
PHASES, QUICK_PHASES = 5, 3
RATE, QUICK_RATE = 30.0, 6.0
MEMORIES, QUICK_MEMORIES = (0.9, 0.6, 0.2), (0.2,)

DIFFERS = (
    "Services are placed for a first minute, whose requests are not served, and then serve four more; "
    "their popularity changes with every minute. `memory` is the correlation of (the logarithm of) a "
    "service's popularity with that of the minute before. Intervals begin with a minute and stay within "
    "30 s and two minutes, beta is 0.1. never: nothing is placed anew; literal: after every interval; "
    "hysteresis: where the new placement would have kept the goals of 2% more of the last interval's "
    "requests, or had a latency 15% smaller.",
    "Charged for a change: groups that change wait for the weights that their devices lack, at 16 GB/s "
    "for each device from the host, which holds all weights; their requests go on from their tokens, with"
    " KV computed anew. The search itself is overlapped with serving, and takes no time.",
    "The paper prints one number: without adaptive re-placement, latency is up to 2.44 times larger and "
    "attainment 1.33 times smaller (Fig. 8).",
)


def run(effort: Effort) -> Result:
    """Every change of traffic, with and without placing anew."""
    phase_s = effort.choose(PHASE_S, QUICK_PHASE_S)
    rule = IntervalRule(first_s=phase_s, least_s=phase_s / 2, most_s=2 * phase_s)
    rate, phases = effort.choose(RATE, QUICK_RATE), effort.choose(PHASES, QUICK_PHASES)
    runs = [
        Run("seallm", Traffic(rate, phase_s, phases, memory), replaces, DEVICES, rule)
        for memory in effort.choose(MEMORIES, QUICK_MEMORIES)
        for replaces in REPLACES
    ]
    found = at_each(effort, NAME, measure, runs, heaviest_first=lambda run: run.replaces != "never")
    by_run = dict(zip(runs, found, strict=True))
    rows = []
    for run_, metrics in by_run.items():
        never = by_run[Run("seallm", run_.traffic, "never", DEVICES, rule)]
        factors = {
            "latency_factor": _ratio(never["normalised_latency"], metrics["normalised_latency"]),
            "attainment_factor": _ratio(metrics["slo_attainment"], never["slo_attainment"]),
        }
        config: dict[str, Value] = {"replaces": run_.replaces, "memory": run_.traffic.memory}
        paper = {"latency_factor": 2.44, "attainment_factor": 1.33} if run_.replaces == "literal" else None
        rows.append(Row(config=config, metrics={**metrics, **factors}, paper=paper))
    return Result(
        name=NAME,
        paper=PAPER + ", section 4.3 and Fig. 8",
        assumptions=[*(line for line in ASSUMPTIONS if "nothing is placed anew" not in line), *DIFFERS],
        rows=rows,
        panels=[
            [
                lines(rows, x="memory", y=metric, by="replaces", where={}, x_label="memory", y_label=label)
                for metric, label in (
                    ("normalised_latency", "mean latency / L^"),
                    ("slo_attainment", "share within 5 L^"),
                )
            ]
        ],
    )


def _ratio(over: Value, under: Value) -> float:
    assert isinstance(over, float)
    assert isinstance(under, float)
    return over / max(under, 1e-3)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SeaLLM, section 4.3 and Fig. 8",
    says="latency and goals kept with services placed anew, always or where it is worth it, and without",
    run=run,
)
