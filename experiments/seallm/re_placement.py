"""Re-placement of services under changing popularity against none (SeaLLM, section 4.3 and Fig. 8)."""

from experiments.parallel import map_points
from experiments.pictures import line_panel
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.seallm.changing_traffic import REPLACES, Run, measure
from experiments.seallm.end_to_end import ASSUMPTIONS, DEVICES
from experiments.seallm.group_runs import PAPER
from experiments.seallm.services import Traffic
from shoal.place.re_placement import IntervalRule

NAME = "seallm-replacement"
PHASE_S, QUICK_PHASE_S = 60.0, 6.0
PHASES, QUICK_PHASES = 5, 3
RATE, QUICK_RATE = 30.0, 6.0
MEMORIES, QUICK_MEMORIES = (0.9, 0.6, 0.2), (0.2,)

DIFFERS = (
    "Services are placed for a first minute, whose requests are not served, and then serve four more; "
    "their popularity changes every minute. `memory` is the correlation of (the logarithm of) a service's "
    "popularity with that of the minute before. Intervals begin with a minute and stay between 30 s and two "
    "minutes, beta is 0.1. Services are re-placed never, after every interval (literal), or (hysteresis) if "
    "the new placement would have met the SLO of 2% more of the last interval's requests, or reduced their "
    "latency by 15%.",
    "Cost of a change: changed groups wait for the weights that their devices lack, at 16 GB/s for each "
    "device from the host, which holds all weights; their requests continue from their tokens, with "
    "recomputed KV. The search overlaps with serving and takes no time.",
    "The paper prints one number: without adaptive re-placement, latency is up to 2.44 times larger and "
    "attainment 1.33 times smaller (Fig. 8).",
)


def run(effort: Effort) -> Result:
    phase_s = effort.choose(PHASE_S, QUICK_PHASE_S)
    rule = IntervalRule(first_s=phase_s, least_s=phase_s / 2, most_s=2 * phase_s)
    rate, phases = effort.choose(RATE, QUICK_RATE), effort.choose(PHASES, QUICK_PHASES)
    runs = [
        Run("seallm", Traffic(rate, phase_s, phases, memory), replaces, DEVICES, rule)
        for memory in effort.choose(MEMORIES, QUICK_MEMORIES)
        for replaces in REPLACES
    ]
    found = map_points(effort, NAME, measure, runs, heaviest_first=lambda run: run.replaces != "never")
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
        assumptions=[*(line for line in ASSUMPTIONS if "no service is re-placed" not in line), *DIFFERS],
        rows=rows,
        panels=[
            [
                line_panel(
                    rows, x="memory", y=metric, by="replaces", where={}, x_label="memory", y_label=label
                )
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
    measures="latency and SLO attainment with services re-placed always, if it pays, and never",
    run=run,
)
