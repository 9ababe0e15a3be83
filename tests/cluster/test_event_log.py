"""A manager's log is read as it was written, and shows where another decision is made."""

import io

import pytest
from manager_builders import SPEED

from shoal.cluster.manager.dispatch import dispatch_named
from shoal.cluster.manager.event_log import EventLogWriter, ReplayDiffers, read_log, replay
from shoal.cluster.manager.events import (
    ClusterEvent,
    Ended,
    EngineAdded,
    EngineEnded,
    EngineReady,
    Submitted,
    Ticked,
)
from shoal.cluster.manager.manager import Manager
from shoal.cluster.options import ClusterOptions, RestartOptions

OPTIONS = ClusterOptions(dispatch="max-min", hung_after_s=5, restart=RestartOptions(first_s=0.5))
EVENTS: list[ClusterEvent] = [
    EngineAdded("e0", ("a",)),
    EngineReady("e0", 1, {"a": SPEED}),
    Submitted("r0", "a", 10, 20, 2, (1, 2**62)),
    EngineEnded("e0", 1, "killed", ("r0",)),
    Ticked(),
    Ended("r0"),
]


def written() -> list[bytes]:
    file = io.BytesIO()
    writer = EventLogWriter(file, OPTIONS)
    manager = Manager(OPTIONS, dispatch_named(OPTIONS.dispatch))
    for number, event in enumerate(EVENTS):
        writer.write(number * 10**9, event, manager.handle(event, number * 10**9))
    return file.getvalue().splitlines(keepends=True)


def test_a_log_is_read_as_it_was_written() -> None:
    options, entries = read_log(written())
    assert options == OPTIONS
    assert [event for _, event, _ in entries] == EVENTS
    assert [len(actions) for _, _, actions in entries] == [1, 0, 1, 0, 1, 0]


def test_a_replay_decides_the_same() -> None:
    replay(written())


def test_a_line_that_was_cut_off_does_not_count() -> None:
    lines = written()
    replay([*lines[:-1], lines[-1][:-5]])
    assert len(read_log([*lines[:-1], lines[-1][:-5]])[1]) == len(EVENTS) - 1


def test_a_replay_names_the_first_other_decision() -> None:
    lines = written()
    lines[3] = lines[3].replace(b'"attempt":1', b'"attempt":2')
    with pytest.raises(ReplayDiffers, match=r"event 3, Submitted\(request='r0'"):
        replay(lines)


def test_other_files_and_versions_are_refused() -> None:
    with pytest.raises(ValueError, match="version 99"):
        read_log([written()[0].replace(b'"version":1', b'"version":99')])
    with pytest.raises(ValueError, match="empty"):
        read_log([])
