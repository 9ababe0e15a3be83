"""Changes of operators that the next server makes again."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from admin_builders import ChangingCluster, Operator

from shoal.cluster.status import EngineState, EngineStatus
from shoal.config.setting_tree import node_of
from shoal.core import SLO, ConfigError, Service
from shoal.serve.admin.kept_changes import AddedEngine, AddedService, Changes, KeptChanges, state_dir
from shoal.serve.admin.restore import restore_changes

CPU = node_of({"device": "cpu"}, "a request")
CHAT = Service(name="new", model="smollm2", slo=SLO(ttft_s=2.0), idle_after_s=60.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for states."""
    monkeypatch.setenv("SHOAL_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def test_what_is_kept_is_read_by_the_next_server() -> None:
    kept = KeptChanges.of("c")
    kept.service_added(CHAT, ["0"])
    kept.engine_added("b", node_of({"device": "cpu", "kv_memory": "1MiB", "services": ["new"]}, "a request"))
    kept.service_removed("old")
    kept.engine_left("0", "standby")
    kept.service_pinned("chat", True)
    kept.service_placed("chat", ["0", "b"])
    found = KeptChanges.of("c").now
    assert found == Changes(
        added=(
            AddedService(CHAT, ("0",)),
            AddedEngine("b", {"device": "cpu", "kv_memory": "1MiB", "services": ["new"], "name": "b"}),
        ),
        removed_services=("old",),
        left={"0": "standby"},
        pins={"chat": True},
        placements={"chat": ("0", "b")},
    )
    assert found.in_words() == [
        "service new was added",
        "engine b was added",
        "service old was removed",
        "engine 0 is on standby",
        "service chat is on engine 0, b",
        "service chat is pinned",
    ]


def test_what_was_added_and_removed_leaves_nothing() -> None:
    kept = KeptChanges.of("c")
    kept.service_added(CHAT, None)
    kept.service_pinned("new", True)
    kept.service_placed("new", ["b"])
    kept.engine_added("b", CPU)
    kept.engine_left("b", "drained")
    kept.engine_removed("b")
    kept.service_removed("new")
    assert KeptChanges.of("c").now == Changes()


def test_an_engine_that_was_removed_is_in_no_placement() -> None:
    kept = KeptChanges.of("c")
    kept.service_placed("chat", ["0", "1"])
    kept.engine_removed("0")
    kept.engine_removed("0")
    assert kept.now == Changes(removed_engines=("0",), placements={"chat": ("1",)})


def test_an_engine_that_takes_requests_again_is_no_change() -> None:
    kept = KeptChanges.of("c")
    kept.engine_left("0", "drained")
    kept.engine_left("0", None)
    assert kept.now == Changes()


def test_a_service_that_is_added_again_keeps_its_place() -> None:
    kept = KeptChanges.of("c")
    kept.service_added(CHAT, None)
    kept.engine_added("b", CPU)
    kept.service_added(CHAT, ["0"])
    assert [each.name for each in kept.now.added] == ["new", "b"]
    assert kept.now.added[0] == AddedService(CHAT, ("0",))


def test_clusters_do_not_share_changes(folder: Path) -> None:
    KeptChanges.of("c").service_removed("old")
    assert KeptChanges.of("d").now == Changes()
    KeptChanges.of(None).service_removed("old")
    assert [file.name for file in folder.iterdir()] == ["c.json"]


@pytest.mark.parametrize("content", ["{", '{"version": "one"}', '{"version": 2}', '{"left": {"0": "gone"}}'])
def test_a_file_that_cannot_be_read_is_an_error_that_says_what_to_do(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "c.json").write_text(content)
    with pytest.raises(ConfigError, match=r"c\.json.*delete it"):
        KeptChanges.of("c")


def test_a_folder_that_cannot_be_written_loses_no_operation(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    kept = KeptChanges(folder / "c.json", Changes())
    kept.service_removed("old")
    assert kept.now.removed_services == ("old",)
    assert "is lost when the server ends" in caplog.text


def test_the_folder_is_that_of_the_user_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", "/states")
    assert state_dir() == Path("/states/shoal")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_dir() == Path.home() / ".local/state/shoal"


def test_a_server_makes_the_changes_of_the_one_before_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def first() -> None:
        async with Operator(ChangingCluster(), tmp_path, kept=KeptChanges.of("c")) as operator:
            await operator.done(await operator.add(name="new", model="smollm2", slo={"ttft": "2s"}))
            b = {"device": "cpu", "name": "b", "threads": 2, "services": ["chat"]}
            for body in (b, {"device": "cpu", "name": "z"}):
                await operator.done(await operator.client.post("/admin/engines", json=body))
            placed = {"service": "new", "engines": ["0", "z"]}
            await operator.done(await operator.client.post("/admin/placement", json=placed))
            await operator.done(await operator.client.post("/admin/engines/b/standby"))
            await operator.done(await operator.client.post("/admin/engines/z/drain"))
            await operator.done(await operator.client.delete("/admin/services/base"))
            await operator.done(await operator.client.post("/admin/services/new/pin"))

    async def second() -> None:
        async with Operator(ChangingCluster(), tmp_path, kept=KeptChanges.of("c")) as operator:
            await restore_changes(operator.admin)
            assert set(operator.cluster.services) == {"chat", "new"}
            assert {each.name: each.state for each in operator.cluster.engines} == {
                "0": EngineState.READY,
                "b": EngineState.STANDBY,
                "z": EngineState.DRAINING,
            }
            [service, *_] = operator.cluster.administration.added[0]
            assert (service.name, service.slo) == ("new", SLO(ttft_s=2.0))
            plan = operator.cluster.administration.plans[0]
            assert (plan.name, plan.options.threads) == ("b", 2)
            assert [service.name for service in plan.options.services] == ["chat"]
            assert operator.cluster.info.services["new"].pinned
            assert operator.cluster.administration.placed == [("new", ("0", "z"))]

    asyncio.run(first())
    before = KeptChanges.of("c").now
    asyncio.run(second())
    assert KeptChanges.of("c").now == before
    assert "changes of operators are made again" in caplog.text
    assert "service new was added; engine b was added" in caplog.text


def test_a_change_that_fails_is_logged_and_the_others_are_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptChanges.of("c")
    kept.service_added(Service(name="bad", model="gemma3-270m"), None)
    kept.service_added(CHAT, ["nowhere"])
    kept.engine_added("b", CPU)

    async def test() -> None:
        async with Operator(ChangingCluster(), tmp_path, kept=KeptChanges.of("c")) as operator:
            await restore_changes(operator.admin)
            assert [engine.name for engine in operator.cluster.engines] == ["0", "b"]

    asyncio.run(test())
    assert "add service bad: service 'bad' cannot be loaded: out of luck" in caplog.text
    assert "add service new: there is no engine 'nowhere'" in caplog.text
    assert len(KeptChanges.of("c").now.added) == 3


def after_restart(tmp_path: Path, changes: Sequence[tuple[str, str, dict[str, object] | None]]) -> set[str]:
    """Engines and services of a server that is started again after these requests to the first."""

    async def first() -> None:
        async with Operator(TwoEngines(), tmp_path, kept=KeptChanges.of("c")) as operator:
            for method, path, body in changes:
                await operator.done(await operator.client.request(method, f"/admin/{path}", json=body))

    async def second() -> set[str]:
        async with Operator(TwoEngines(), tmp_path, kept=KeptChanges.of("c")) as operator:
            await restore_changes(operator.admin)
            return {engine.name for engine in operator.cluster.engines} | set(operator.cluster.services)

    asyncio.run(first())
    return asyncio.run(second())


class TwoEngines(ChangingCluster):
    """Engines 0 and 1 are those of the configuration."""

    def __init__(self) -> None:
        super().__init__()
        one = EngineStatus(name="1", state=EngineState.READY, services=("chat", "base"), device="cpu")
        self.others = [*self.others, one]


NEW = {"name": "new", "model": "smollm2"}
B = {"device": "cpu", "name": "b"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # The new engine gets the free name.
        ([("DELETE", "engines/1", None), ("POST", "engines", {"device": "cpu"})], {"0", "1"}),
        ([("DELETE", "services/base", None), ("POST", "services", NEW | {"name": "base"})], {"base", "1"}),
        (
            [
                ("POST", "engines", B),
                ("POST", "services", NEW | {"engines": ["0", "b"]}),
                ("DELETE", "engines/b", None),
            ],
            {"new", "1"},
        ),
        (
            [
                ("POST", "services", NEW),
                ("POST", "engines", B | {"services": ["chat", "new"]}),
                ("DELETE", "services/new", None),
            ],
            {"b", "1"},
        ),
    ],
)
def test_what_replaced_or_lost_something_is_there_again(
    tmp_path: Path, changes: Sequence[tuple[str, str, dict[str, object] | None]], expected: set[str]
) -> None:
    assert expected <= after_restart(tmp_path, changes)


def test_changes_of_what_is_gone_from_the_configuration_are_forgotten(tmp_path: Path) -> None:
    kept = KeptChanges.of("c")
    kept.service_removed("gone")
    kept.engine_removed("gone")
    kept.engine_left("gone", "drained")
    kept.service_pinned("gone", True)
    kept.service_placed("gone", ["0"])

    async def test() -> None:
        async with Operator(ChangingCluster(), tmp_path, kept=KeptChanges.of("c")) as operator:
            await restore_changes(operator.admin)

    asyncio.run(test())
    assert KeptChanges.of("c").now == Changes()
