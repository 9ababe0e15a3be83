"""Throughput and utilisation of UELLM's device maps (Table 1) and deployment algorithms (Fig. 4c, d)."""

from collections.abc import Mapping
from statistics import fmean

from experiments.registry import Reproduction
from experiments.result import Effort, Result, Row, Value, between
from experiments.uellm.testbed import (
    GB,
    LAYERS,
    TABLE_1,
    busy_share,
    even_map,
    fitted_layer_s,
    four_devices,
    pair_problem,
)
from shoal.core import ConfigError, uniform
from shoal.measure import Panel, Series
from shoal.place.device_maps import DEVICE_MAPS, DeviceMap, MapProblem, evaluate, stages_of

NAME = "uellm-deployment"
PAPER = (
    "UELLM (He et al., 2024: A Unified and Efficient Approach for LLM Inference Serving), Table 1 and Fig. 4"
)
DRAWS = 200
LEAST_FREE, MOST_FREE = 2 * GB, 24 * GB

ASSUMPTIONS = (
    "Table 1: 33 equal layers of ChatGLM2-6B (12.5 GB); a layer takes {first_ms:.2f} ms on the V100 and "
    "{second_ms:.2f} ms on the RTX 3090. These two constants are fitted to its five means (least squares of "
    "the relative errors); the link is crossed once in every row, and is in both.",
    "`helr` and the other maps of Table 1's devices: the result of the search when the V100 has memory for "
    "as many layers as given, and the RTX 3090 for all.",
    "a1 and a2 occur in none of the paper's formulas. HELR weighs the time of a pass, relative to that of "
    "the fastest device alone, and the number of devices, relative to the fewest that can hold the model, "
    "equally; LR weighs the time ten times; HE takes the fewest devices, then the least time. `cost` is the "
    "time alone.",
    "Fig. 4 (c, d): the paper prints neither figures nor the free memory. Table 2's four RTX 3090 each have "
    "between 2 and 24 GB free, at random; {draws} draws in which the model fits, the same for all.",
    "A device is as fast as its power limit says, the one of 350 W as the faster of Table 1. PIX takes "
    "20 us, NODE 50 us, and 8 kB cross.",
    "Utilisation: the share of a pass in which a device in use computes; one device computes at a time.",
    "`even` has equally many layers on every device, like accelerate's balanced maps; only with all free.",
)
DIFFERS = (
    "Differs: greedy has the utilisation of HE. It fills the largest memories, so it takes the fewest "
    "devices too, but regardless of their speed.",
)


def run(effort: Effort) -> Result:
    draws = effort.choose(DRAWS, DRAWS // 10)
    first_s, second_s = fitted_layer_s()
    facts = {"first_ms": first_s * 1e3, "second_ms": second_s * 1e3, "draws": draws}
    rows = [*_table_1(), *_searched(), *_all_free(), *_some_free(effort, draws)]
    return Result(
        name=NAME,
        paper=PAPER,
        assumptions=[line.format_map(facts) for line in ASSUMPTIONS] + list(DIFFERS),
        rows=rows,
        panels=[_panels(rows)],
    )


def _table_1() -> list[Row]:
    problem = pair_problem(LAYERS)
    rows = []
    for layers, mean, most, least in TABLE_1:
        printed = evaluate(problem, stages_of([("GPU#0", layers), ("GPU#1", LAYERS - layers)]))
        paper = {"tokens_per_s": mean, **between("tokens_per_s", least, most)}
        rows.append(_row("Table 1", "printed", printed, {}, paper))
    return rows


def _searched() -> list[Row]:
    """Maps found for Table 1's devices, with memory on the first as in its last row, and for all layers."""
    return [
        _row(f"room for {room}", name, DEVICE_MAPS[name](pair_problem(room)), {}, None)
        for room in (LAYERS - 1, LAYERS)
        for name in DEVICE_MAPS
    ]


def _all_free() -> list[Row]:
    problem = four_devices([24 * GB] * 4)
    maps = {name: find(problem) for name, find in DEVICE_MAPS.items()}
    maps["even"] = even_map(problem, 4)
    return [
        _row("all free", name, device_map, {"utilisation": busy_share(problem, device_map)}, None)
        for name, device_map in maps.items()
    ]


def _some_free(effort: Effort, draws: int) -> list[Row]:
    maps: dict[str, list[tuple[MapProblem, DeviceMap]]] = {name: [] for name in DEVICE_MAPS}
    problems = _problems(draws)
    for problem in effort.each(NAME, problems):
        for name, find in DEVICE_MAPS.items():
            maps[name].append((problem, find(problem)))
    return [
        Row(
            config={"devices": "some free", "map": name, "layers": None},
            metrics={
                "tokens_per_s": fmean(1 / one.cost_s for _, one in found),
                "utilisation": fmean(busy_share(problem, one) for problem, one in found),
                "devices_used": fmean(len(one.stages) for _, one in found),
            },
        )
        for name, found in maps.items()
    ]


def _problems(draws: int) -> list[MapProblem]:
    """Devices with random free memory in which the model fits."""
    problems: list[MapProblem] = []
    seed = 0
    while len(problems) < draws:
        free = [LEAST_FREE + (MOST_FREE - LEAST_FREE) * uniform(seed, device) for device in range(4)]
        problem = four_devices([int(size) for size in free])
        seed += 1
        try:
            DEVICE_MAPS["greedy"](problem)
        except ConfigError:
            continue
        problems.append(problem)
    return problems


def _row(
    devices: str,
    name: str,
    device_map: DeviceMap,
    metrics: Mapping[str, Value],
    paper: Mapping[str, Value] | None,
) -> Row:
    layers = ", ".join(f"{stage.device} {stage.layers}" for stage in device_map.stages)
    found: dict[str, Value] = {"tokens_per_s": 1 / device_map.cost_s, **metrics}
    found["devices_used"] = len(device_map.stages)
    return Row(config={"devices": devices, "map": name, "layers": layers}, metrics=found, paper=paper)


def _panels(rows: list[Row]) -> list[Panel]:
    table_1 = [row for row in rows if row.config["devices"] == "Table 1"]
    layers = [float(on_first) for on_first, *_ in TABLE_1]
    series = [
        Series("paper", layers, [float(mean) for _, mean, *_ in TABLE_1], colour=0),
        Series("ours", layers, [_number(row, "tokens_per_s") for row in table_1], line=True, colour=1),
    ]
    fit = Panel(title="Table 1", x_label="layers on the V100", y_label="tokens/s", series=series)
    busy = [row for row in rows if row.config["devices"] == "some free"]
    points = [
        Series(
            str(row.config["map"]),
            [_number(row, "utilisation")],
            [_number(row, "tokens_per_s")],
            colour=colour,
        )
        for colour, row in enumerate(busy)
    ]
    return [
        fit,
        Panel(title="Fig. 4c, d", x_label="share of devices' time", y_label="tokens/s", series=points),
    ]


def _number(row: Row, metric: str) -> float:
    return float(row.metrics[metric] or 0)


REPRODUCTION = Reproduction(
    name=NAME,
    paper="UELLM, Table 1 and Fig. 4c, d",
    measures="throughput and utilisation of device maps: HELR, HE, LR, cost alone, greedy",
    run=run,
)
