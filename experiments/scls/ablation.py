"""Ablation of SCLS: its ideas added one by one (Figs. 15 and 16)."""

from experiments.padded.presets import static_preset
from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value
from experiments.scls.setup import (
    ASSUMPTIONS,
    ENGINES,
    PAPER,
    QUICK_SECONDS,
    SECONDS,
    figures,
    ratio,
    run_static,
)
from experiments.scls.throughput import MARGINS

NAME = "scls-ablation"
LADDER = ("sls", "so", "pm", "ab", "lb", "scls")

DIFFERS = (
    "Differs: max-min offloading adds little (5% and 1%): with every engine overloaded, batches of equal "
    "size dealt in turn are nearly balanced already, and queues hide the rest.",
)


def run(effort: Effort) -> Result:
    seconds = effort.choose(SECONDS, QUICK_SECONDS)
    points = [(engine, step) for engine in ENGINES for step in LADDER]
    rows: list[Row] = []
    firsts: dict[str, dict[str, Value]] = {}
    for engine, step in effort.each(NAME, points):
        found = run_static(static_preset(step, engine), engine, seconds=seconds)
        metrics = figures(found) | {"completion_std_s": found.report.worker_completion_std_s}
        firsts.setdefault(engine, metrics)
        metrics["throughput_over_sls"] = ratio(metrics, firsts[engine], "throughput")
        printed = {name: value for name, value in MARGINS[engine].items() if name.startswith("throughput")}
        config: dict[str, Value] = {"engine": engine, "step": step}
        rows.append(Row(config=config, metrics=metrics, paper=printed if step == LADDER[-1] else None))
    return Result(
        name=NAME,
        paper=PAPER + ", Figs. 15 and 16",
        assumptions=[
            *ASSUMPTIONS,
            "The paper draws the ladder without printing it: throughput rises with every step. The range "
            "in the last row is section 5.2's over all arrival rates.",
            *DIFFERS,
        ],
        rows=rows,
    )


REPRODUCTION = Reproduction(
    name=NAME,
    paper="SCLS, Figs. 15 and 16",
    measures="what each idea adds: SLS, slices, padding, adaptive batches, load balancing, interval",
    run=run,
)
