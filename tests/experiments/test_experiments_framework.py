"""Framework of experiments: results, registry, parallel points and line charts."""

import json
import math
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from experiments import FULL, REPRODUCTIONS, Effort, Reproduction, Result, Row, between, find
from experiments.parallel import map_points
from experiments.pictures import line_panel
from shoal.core import ConfigError


def test_a_result_is_written_in_the_shared_schema() -> None:
    rows = [
        Row(config={"rate": 2.0, "system": "a"}, metrics={"x": 0.5, "gone": math.nan}, paper={"x": 0.6}),
        Row(config={"rate": 3.0, "system": "b"}, metrics={"x": None}, paper=between("x", 0.1, 0.2)),
        Row(config={}, metrics={}),
    ]
    result = Result(name="n", paper="p", assumptions=["one"], rows=rows)
    assert json.loads(json.dumps(result.to_json(), allow_nan=False)) == {
        "name": "n",
        "paper": "p",
        "assumptions": ["one"],
        "rows": [
            {
                "config": {"rate": 2.0, "system": "a"},
                "metrics": {"x": 0.5, "gone": None},
                "paper": {"x": 0.6},
            },
            {
                "config": {"rate": 3.0, "system": "b"},
                "metrics": {"x": None},
                "paper": {"x_least": 0.1, "x_most": 0.2},
            },
            {"config": {}, "metrics": {}, "paper": None},
        ],
    }


def test_effort_chooses_sizes_and_reports_progress() -> None:
    reported = []
    effort = Effort(quick=True, progress=lambda *what: reported.append(what))
    assert (FULL.choose(2, 1), effort.choose(2, 1)) == (2, 1)
    assert list(effort.each("w", ["a", "b"])) == ["a", "b"]
    assert reported == [("w", 0, 2), ("w", 1, 2), ("w", 2, 2)]
    assert list(FULL.each("w", [1])) == [1]


def workers_of(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    workers = []
    for child in children:
        with suppress(psutil.NoSuchProcess):  # it has just ended, zombies included
            if any("spawn_main" in word for word in child.cmdline()):
                workers.append(child)
    return workers


@pytest.fixture
def two_cores(monkeypatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)


def test_points_run_in_processes_and_keep_their_order(two_cores) -> None:
    assert map_points(FULL, "points", abs, [-3, 2, -1], heaviest_first=abs) == [3, 2, 1]


def test_an_error_ends_running_points(two_cores) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        map_points(FULL, "points", time.sleep, [600, -1])
    assert psutil.wait_procs(workers_of(os.getpid()), timeout=60)[1] == []


def test_no_worker_outlives_its_parent() -> None:
    script = (
        "import os, time\n"
        "from experiments import FULL\n"
        "from experiments.parallel import map_points\n"
        "os.cpu_count = lambda: 2\n"
        "print('started', flush=True)\n"
        "map_points(FULL, 'points', time.sleep, [600, 600])\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        parent.stdout.readline()
        workers: list[psutil.Process] = []
        while len(workers) < 2:
            time.sleep(0.01)
            workers = workers_of(parent.pid)
        parent.kill()
    assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.parametrize("name", REPRODUCTIONS)
def test_every_name_imports_its_reproduction(name) -> None:
    reproduction = REPRODUCTIONS[name]
    assert isinstance(reproduction, Reproduction)
    assert reproduction.name == name
    assert reproduction.paper
    assert reproduction.measures


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    first = next(iter(REPRODUCTIONS))
    assert find([first]) == [REPRODUCTIONS[first]]
    with pytest.raises(ConfigError, match=f"did you mean '{first}'.*{first}"):
        find([first + "s"])


def test_a_panel_has_a_line_for_each_value() -> None:
    rows = [
        Row(config={"x": x, "by": by, "engine": "e"}, metrics={"y": x * 2.0, "z": None})
        for x in (1.0, 2.0)
        for by in ("a", "b")
    ]
    rows.append(Row(config={"x": 9.0, "by": "a", "engine": "other"}, metrics={"y": 0.0}))
    panel = line_panel(rows, x="x", y="y", by="by", where={"engine": "e"}, x_label="", y_label="")
    assert [(one.label, list(one.x), list(one.y)) for one in panel.series] == [
        ("a", [1.0, 2.0], [2.0, 4.0]),
        ("b", [1.0, 2.0], [2.0, 4.0]),
    ]
    assert [one.line for one in panel.series] == [True, True]
    alone = line_panel(rows, x="x", y="y", by="by", where={"engine": "other"}, x_label="", y_label="")
    assert [one.line for one in alone.series] == [False]
    empty = line_panel(rows, x="x", y="z", by="by", where={"engine": "e"}, x_label="", y_label="")
    assert [list(one.x) for one in empty.series] == [[], []]
