"""``shoal engines`` and ``shoal services`` against a server that says little."""

import json

import pytest
from cli_builders import FakeApi, fake_server

from shoal.cli import admin_client
from shoal.cli.app import run
from shoal.cli.demo.run import free_port

READY = {
    "name": "0",
    "state": "ready",
    "device": "cpu",
    "services": ["chat", "x[/red]"],
    "pid": 4321,
    "requests": 7,
    "restarts": 0,
    "heartbeat_age_s": 0.25,
    "last_error": None,
    "kv_bytes": 64 << 20,
    "weight_bytes": 32 << 20,
    "weights_memory_bytes": None,
}
WAITING = READY | {
    "name": "b",
    "state": "waiting",
    "pid": None,
    "requests": 0,
    "restarts": 3,
    "heartbeat_age_s": None,
    "last_error": "killed by [signal] 9",
    "kv_bytes": None,
}
CHAT = {
    "name": "chat",
    "model": "smollm2",
    "state": "ready",
    "error": None,
    "engines": ["0", "b"],
    "ready": 1,
    "wanted": 2,
    "waiting": 4,
    "resumed": 12,
    "weight_bytes": 160 << 20,
    "weights": {"0": "resident", "b": "resident"},
    "pinned": False,
}
ASLEEP = CHAT | {"name": "base", "state": "failed", "error": "no [room]", "ready": 0}
OPERATION = {
    "id": "7",
    "kind": "add_service",
    "target": "new",
    "state": "running",
    "progress": "downloading",
    "done": 1,
    "total": 4,
    "error": None,
}
DONE = OPERATION | {"state": "done"}
FAILED = OPERATION | {"state": "failed", "error": "no room"}


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(admin_client, "_POLL_S", 0.01)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("SHOAL_ADMIN_KEY", raising=False)


def ask(capsys, *arguments, status=0, **admin):
    api = FakeApi(admin=admin)
    with fake_server(api) as url:
        assert run([*arguments, "--url", url]) == status
    out, err = capsys.readouterr()
    return (err if status else out), api


def test_engines_are_a_table(capsys):
    text, _ = ask(capsys, "engines", "list", engines={"data": [READY, WAITING]})
    [ready] = [line for line in text.splitlines() if "4321" in line]
    for part in ("0", "ready", "cpu", "chat, x[/red]", "7", "0.2 s", "64.0 MiB"):
        assert part in ready
    [waiting] = [line for line in text.splitlines() if "waiting" in line]
    assert waiting.split()[4:] == ["x[/red]", "-", "0", "3", "-", "-"]
    assert "engine b ended last: killed by [signal] 9" in text


def test_a_terminal_of_80_columns_leaves_names_whole(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text, _ = ask(capsys, "engines", "list", engines={"data": [READY, WAITING]})
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("chat," in line for line in lines)
    assert any("heartbeat KV" in line for line in lines)
    assert sum("x[/red]" in line for line in lines) == 2


def test_the_memory_for_weights_is_shown_where_it_is_limited(capsys):
    text, _ = ask(capsys, "engines", "list", engines={"data": [READY, WAITING]})
    assert "weights" not in text
    limited = READY | {"weights_memory_bytes": 48 << 20}
    text, _ = ask(capsys, "engines", "list", engines={"data": [limited, WAITING]})
    [ready] = [line for line in text.splitlines() if "4321" in line]
    assert "32.0 MiB of 48.0 MiB" in ready


def test_the_memory_for_weights_leaves_the_other_columns_whole_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    limited = READY | {"weights_memory_bytes": 4800 << 20, "weight_bytes": 3200 << 20}
    text, _ = ask(capsys, "engines", "list", engines={"data": [limited]})
    assert max(map(len, text.splitlines())) <= 80
    for part in ("name", "heartbeat", "chat,", "4321", "64.0 MiB", "4,800.0", "3,200.0"):
        assert part in text


def test_places_of_weights_have_the_names_of_engines_where_they_differ(capsys):
    away = CHAT | {"name": "away", "weights": {"0": "absent"}}
    mixed = CHAT | {"name": "mixed", "weights": {"0": "absent", "b": "coming"}}
    unknown = CHAT | {"name": "unknown", "weights": {}, "weight_bytes": None}
    pinned = CHAT | {"name": "pinned", "pinned": True}
    text, _ = ask(capsys, "services", "list", services={"data": [CHAT, away, mixed, unknown, pinned]})
    found = {line.split()[0]: line for line in text.splitlines() if "smollm2" in line}
    assert "resident" in found["chat"]
    assert "absent 160.0 MiB" in " ".join(found["away"].split())
    assert "0: absent, b: coming" in found["mixed"]
    assert "resident pinned" in found["pinned"]
    assert found["unknown"].split()[-4:] == ["-", "-", "4", "12"]


def test_services_are_a_table(capsys):
    text, _ = ask(capsys, "services", "list", services={"data": [CHAT, ASLEEP]})
    chat, asleep = (line for line in text.splitlines() if "smollm2" in line)
    for part in ("chat", "ready", "0, b", "1 of 2", "resident", "160.0 MiB", "4", "12"):
        assert part in chat
    assert "failed" in asleep
    assert "service base could not be loaded: no [room]" in text


FIXED = {
    "placement": {"chat": ["0", "b"]},
    "policy": "fixed",
    "interval_s": None,
    "last": None,
    "change": None,
}
SEARCHED = {
    "placement": {"chat": ["0", "b"], "new": ["b"]},
    "policy": "search",
    "interval_s": 54.0,
    "last": {
        "length_s": 60.0,
        "services": {"chat": {"arrived": 12, "ended": 10, "attainment": 0.8, "mean_latency_s": 2.0}},
        "changes": True,
        "why": "goals met 80.0% -> 90.0%",
    },
    "change": {"steps": ["+chat on b"], "outcome": None},
}


def test_a_placement_is_a_table_and_what_was_decided(capsys):
    text, _ = ask(capsys, "placement", "show", placement=SEARCHED)
    assert ["chat", "0,", "b", "12", "80.0%", "2.00", "s"] in [line.split() for line in text.splitlines()]
    assert ["new", "b", "-", "-", "-"] in [line.split() for line in text.splitlines()]
    assert "follows the load; the present interval has 54 s" in text
    assert "of 60 s, it was to change: goals met 80.0% -> 90.0%" in text
    assert "the last change, +chat on b: under way" in text
    text, _ = ask(capsys, "placement", "show", placement=FIXED)
    assert "the placement is fixed" in text
    text, _ = ask(capsys, "placement", "show", "--json", placement=FIXED)
    assert json.loads(text) == FIXED


PROPOSED = {
    "steps": ["+chat on b", "-new on b"],
    "why": "goals met 80.0% -> 90.0%",
    "requests": 120,
    "window_s": 42.4,
    "present": {"attainment": 0.8, "normalised_latency": 2.0},
    "found": {"attainment": 0.9, "normalised_latency": 1.5},
}


@pytest.mark.parametrize(("command", "says"), [("plan", "would change: "), ("apply", "changed: ")])
def test_a_placement_is_proposed_for_the_latest_requests(capsys, command, says):
    path = f"placement/{command}"
    answers = {path: (202, OPERATION), "operations/7": [DONE], "placement": FIXED | {"proposal": PROPOSED}}
    text, api = ask(capsys, "placement", command, **answers)
    assert api.changes == [("POST", path, None)]
    assert "for the last 120 requests, of 42 s:" in text
    assert f"{says}+chat on b, -new on b (goals met 80.0% -> 90.0%)" in text
    answers["operations/7"] = [DONE]
    assert json.loads(ask(capsys, "placement", command, "--json", **answers)[0]) == PROPOSED
    stays = PROPOSED | {"steps": [], "why": "the present placement is best"}
    answers |= {"operations/7": [DONE], "placement": FIXED | {"proposal": stays}}
    text, _ = ask(capsys, "placement", command, **answers)
    assert "the placement should stay: the present placement is best" in text


CHANGES = [
    (("services", "remove", "a/b"), "DELETE", "services/a/b", None),
    (("services", "load", "a b"), "POST", "services/a%20b/load", None),
    (("services", "unload", "chat"), "POST", "services/chat/unload", None),
    (("services", "pin", "a/b"), "POST", "services/a/b/pin", None),
    (("services", "unpin", "chat"), "POST", "services/chat/unpin", None),
    (("services", "add", "smollm2"), "POST", "services", {"model": "smollm2"}),
    (
        ("services", "add", "m", "--name", "n", "--engine", "0", "--set", "slo.ttft=2s", "--set", "quota=3"),
        "POST",
        "services",
        {"model": "m", "name": "n", "engines": ["0"], "slo": {"ttft": "2s"}, "quota": "3"},
    ),
    (
        ("placement", "set", "a/b", "0, b"),
        "POST",
        "placement",
        {"service": "a/b", "engines": ["0", "b"]},
    ),
    (("engines", "drain", "b"), "POST", "engines/b/drain", None),
    (("engines", "undrain", "b"), "POST", "engines/b/undrain", None),
    (("engines", "standby", "b"), "POST", "engines/b/standby", None),
    (("engines", "activate", "a b"), "POST", "engines/a%20b/activate", None),
    (("engines", "remove", "b"), "DELETE", "engines/b", None),
    (
        ("engines", "add", "cpu", "--name", "b", "--service", "chat", "--set", "threads=1"),
        "POST",
        "engines",
        {"device": "cpu", "name": "b", "services": ["chat"], "threads": "1"},
    ),
]


@pytest.mark.parametrize(("command", "method", "path", "body"), CHANGES)
def test_changes_wait_for_their_operation(capsys, command, method, path, body):
    answers = {path: (202, OPERATION), "operations/7": [OPERATION, DONE]}
    _, api = ask(capsys, *command, **answers)
    assert api.changes == [(method, path, body)]
    assert api.admin["operations/7"] == []


def test_a_failed_operation_is_reported(capsys):
    answers = {"services": (202, OPERATION), "operations/7": [FAILED]}
    text, _ = ask(capsys, "services", "add", "smollm2", status=1, **answers)
    assert "downloading" in text
    assert "error: no room" in text


def test_without_waiting_the_operation_is_printed(capsys):
    text, _ = ask(capsys, "services", "add", "smollm2", "--no-wait", services=(202, OPERATION))
    assert json.loads(text) == OPERATION


@pytest.mark.parametrize(("refusal", "status"), [(400, 2), (404, 2), (409, 1), (503, 1)])
def test_a_rejected_operation_is_reported(capsys, refusal, status):
    answer = (refusal, {"error": {"message": "it is not to be"}})
    text, _ = ask(capsys, "services", "add", "smollm2", status=status, services=answer)
    assert "it is not to be" in text


@pytest.mark.parametrize("pairs", [("quota",), ("=3",), ("quota=3", "quota=4"), ("slo=1", "slo.ttft=2s")])
def test_wrong_settings_are_rejected_before_a_request(capsys, pairs):
    arguments = [part for pair in pairs for part in ("--set", pair)]
    text, api = ask(capsys, "services", "add", "smollm2", *arguments, status=2)
    assert "--set" in text
    assert not api.changes


@pytest.mark.parametrize("what", ["engines", "services"])
def test_json_is_the_response_of_the_server(capsys, what):
    answer = {"data": [READY], "object": "list"}
    text, _ = ask(capsys, what, "list", "--json", **{what: answer})
    assert json.loads(text) == answer


def test_the_admin_key_comes_from_a_flag_or_the_environment(capsys, monkeypatch):
    _, api = ask(capsys, "engines", "list", engines={"data": []})
    assert "Authorization" not in api.headers[0]
    monkeypatch.setenv("SHOAL_ADMIN_KEY", "sk-environment")
    _, api = ask(capsys, "engines", "list", engines={"data": []})
    assert api.headers[0]["Authorization"] == "Bearer sk-environment"
    _, api = ask(capsys, "services", "list", "--admin-key", "sk-flag", services={"data": []})
    assert api.headers[0]["Authorization"] == "Bearer sk-flag"


def test_an_invalid_admin_key_is_rejected(capsys):
    assert run(["services", "list", "--admin-key", "k\u00e4"]) == 2
    error = "a key must be visible ASCII characters without spaces"
    assert capsys.readouterr().err == f"error: {error} (here --admin-key or SHOAL_ADMIN_KEY gives it)\n"


@pytest.mark.parametrize("status", [401, 403])
def test_denied_access_says_what_is_missing(capsys, status):
    refusal = (status, {"error": {"message": "this route needs the admin key"}})
    text, _ = ask(capsys, "engines", "list", status=2, engines=refusal)
    assert "this route needs the admin key" in text
    assert "SHOAL_ADMIN_KEY" in text


def test_a_response_of_another_server_is_reported(capsys):
    assert "is it a Shoal server?" in ask(capsys, "engines", "list", status=1)[0]
    for answer in ([1], {}, {"data": 3}):
        assert "is it a Shoal server?" in ask(capsys, "services", "list", status=1, services=answer)[0]


def test_a_missing_server_is_reported_with_how_to_start_one(capsys):
    assert run(["engines", "list", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "shoal serve smollm2" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://[::1", "ftp://here"])
def test_a_wrong_url_is_named(capsys, url):
    assert run(["services", "list", "--url", url]) == 2
    assert f"--url {url}" in capsys.readouterr().err


@pytest.mark.parametrize(("what", "command"), [("services", "remove"), ("engines", "drain")])
def test_a_name_that_is_not_utf8_is_rejected(capsys, what, command):
    assert run([what, command, "a\udcff"]) == 2
    assert capsys.readouterr().err == "error: the name 'a\\udcff' is not UTF-8 text\n"
