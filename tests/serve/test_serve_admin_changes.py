"""Operators' changes of services and engines while a server runs."""

import asyncio

import pytest
from admin_builders import UNLOADED, ChangingCluster, Operator
from serve_builders import SERVICES, chat, completion, until

from shoal.cluster.placing.change import Step
from shoal.cluster.placing.status import Proposal
from shoal.cluster.placing.traffic import IntervalFacts, ReplayedRequest
from shoal.cluster.status import EngineState
from shoal.core import SLO
from shoal.forecast.device_specs import device_spec
from shoal.place.estimate import Estimate, ServiceEstimate
from simulated_engines import simulated_options

NEW = {"name": "new", "model": "smollm2"}


def with_operator(test, tmp_path, **options):
    async def main():
        async with Operator(ChangingCluster(), tmp_path, **options) as operator:
            return await test(operator)

    return asyncio.run(main())


def error_of(response, status, code=None):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    return error


def test_an_added_service_is_like_any_other(tmp_path):
    async def test(operator):
        client = operator.client
        error_of(await operator.complete("new"), 404, "model_not_found")
        body = NEW | {"slo": {"ttft": "2s"}, "idle_after": "10min", "sampling": {"temperature": 0.5}}
        operation = await operator.done(await operator.add(**body, engines=["0"]))
        assert (operation["kind"], operation["target"], operation["error"]) == ("add_service", "new", None)
        assert operation["started"] <= operation["ended"]
        [(service, folder, _, engines)] = operator.cluster.administration.added
        assert (service.slo, service.idle_after_s) == (SLO(ttft_s=2), 600)
        assert (folder, engines) == (tmp_path, ("0",))

        answer = (await client.post("/v1/chat/completions", json=chat(model="new"))).json()
        assert answer["choices"][0]["message"]["content"].startswith("<user>hi")
        models = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in models] == ["chat", "base", "new"]
        assert models[2]["sampling_defaults"]["temperature"] == 0.5
        card = await operator.service("new")
        assert (card["state"], card["model"], card["idle_after_s"]) == ("ready", "smollm2", 600)
        page = (await client.get("/metrics")).text
        assert 'shoal_request_ttft_seconds_count{service="new"} 1.0' in page
        assert 'shoal_slo_requests_total{outcome="met",service="new"} 1.0' in page

    with_operator(test, tmp_path)


def test_an_added_service_may_have_random_weights(tmp_path):
    (tmp_path / "m.gguf").touch()

    async def test(operator):
        await operator.done(await operator.add(**NEW, weights="random", weights_seed=3))
        [(service, *_)] = operator.cluster.administration.added
        assert service.random_seed == 3
        error = error_of(await operator.add(model="smollm2", name="x", weights_seed=3), 400)
        assert error["param"] == "weights_seed"
        error = error_of(await operator.add(model=str(tmp_path / "m.gguf"), weights="random"), 400)
        assert "which the GGUF file" in error["message"]

    with_operator(test, tmp_path)


def test_the_document_names_the_present_services(tmp_path):
    async def test(operator):
        async def names(body):
            schemas = (await operator.client.get("/openapi.json")).json()["components"]["schemas"]
            return schemas[body]["properties"]["model"]["enum"]

        assert await names("CompletionBody") == ["chat", "base"]
        await operator.done(await operator.add(**NEW))
        assert await names("CompletionBody") == ["chat", "base", "new"]
        assert await names("ChatBody") == ["chat", "new"]
        await operator.done(await operator.client.delete("/admin/services/new"))
        await operator.done(await operator.add(**NEW | {"name": "base2"}))
        assert await names("CompletionBody") == ["chat", "base", "base2"]
        assert await names("ChatBody") == ["chat"]

    with_operator(test, tmp_path)


def test_while_a_model_downloads_its_service_is_pulling_and_its_name_taken(tmp_path):
    async def test(operator):
        operator.release.clear()
        response = await operator.add(**NEW)
        path = response.headers["location"]
        assert path == f"/admin/operations/{response.json()['id']}"
        async with asyncio.timeout(60):
            while (operation := (await operator.client.get(path)).json())["progress"] != "downloading":
                await asyncio.sleep(0.005)
        assert (operation["state"], operation["done"], operation["total"]) == ("running", 1, 4)
        assert (await operator.service("new"))["state"] == "pulling"
        assert "still running" in error_of(await operator.add(**NEW), 409, "conflict")["message"]
        error_of(await operator.client.post("/admin/services/new/load"), 409, "conflict")
        error_of(await operator.client.delete("/admin/services/new"), 409, "conflict")
        error_of(await operator.complete("new"), 404, "model_not_found")
        await operator.done(await operator.client.post("/admin/services/base/unload"))
        operator.release.set()
        await operator.done(response)
        assert (await operator.service("new"))["state"] == "ready"

    with_operator(test, tmp_path)


def test_a_loading_service_shows_its_model(tmp_path):
    async def test(operator):
        operator.cluster.administration.hold.clear()
        response = await operator.add(**NEW)
        async with asyncio.timeout(60):
            while (card := await operator.service("new"))["state"] != "loading":
                await asyncio.sleep(0.005)
        assert card["model"] == "smollm2"
        operator.cluster.administration.hold.set()
        await operator.done(response)

    with_operator(test, tmp_path)


def test_a_service_that_cannot_be_loaded_leaves_nothing_behind(tmp_path):
    async def test(operator):
        (tmp_path / "config.json").write_text("{}")
        response = await operator.add(name="new", model=str(tmp_path))
        operation = await operator.done(response, "failed")
        assert "out of luck" in operation["error"]
        assert await operator.service("new") is None
        error_of(await operator.complete("new"), 404, "model_not_found")
        await operator.done(await operator.add(**NEW))

    with_operator(test, tmp_path)


def test_the_tokenizer_of_a_removed_service_is_closed(tmp_path):
    async def test(operator):
        await operator.done(await operator.add(**NEW))
        [tokenizer] = operator.tokenizers
        operator.cluster.administration.hold.clear()
        response = await operator.client.delete("/admin/services/new")
        await until(lambda: operator.cluster.administration.held)
        assert not tokenizer.closed  # requests that are being prepared may need it
        operator.cluster.administration.hold.set()
        await operator.done(response)
        assert tokenizer.closed == 1

        await operator.done(await operator.add(**NEW | {"model": "gemma3-270m"}), "failed")
        assert [one.closed for one in operator.tokenizers] == [1, 1]

    with_operator(test, tmp_path)


def test_an_unexpected_error_fails_the_operation_and_is_only_logged(tmp_path, caplog):
    async def test(operator):
        operator.progress = ("a", "too", "many", "arguments")
        operation = await operator.done(await operator.add(**NEW), "failed")
        assert operation["error"] == "internal error; the server's log has the details"

    with_operator(test, tmp_path)
    assert "TypeError" in caplog.text


def test_a_removed_service_is_unknown_at_once_but_its_requests_continue(tmp_path):
    async def test(operator):
        cluster, client = operator.cluster, operator.client
        cluster.hold = asyncio.Event()
        running = asyncio.create_task(client.post("/v1/completions", json=completion()))
        await until(lambda: cluster.paused == 1)
        cluster.administration.hold.clear()
        response = await client.delete("/admin/services/base")
        refused = await client.post("/v1/completions", json=completion())
        error = error_of(refused, 404, "model_not_found")
        assert error["param"] == "model"
        assert "available: chat" in error["message"]
        cluster.hold.set()
        assert (await running).json()["choices"][0]["text"] == "hello world"
        cluster.administration.hold.set()
        await operator.done(response)
        assert await operator.service("base") is None
        # The counters of a removed service stay.
        counted = 'shoal_request_ttft_seconds_count{service="base"} 1.0'
        assert counted in (await client.get("/metrics")).text
        error_of(await client.delete("/admin/services/base"), 404, "model_not_found")
        assert "last one" in error_of(await client.delete("/admin/services/chat"), 409, "conflict")["message"]

    with_operator(test, tmp_path)


def test_a_service_that_is_being_removed_shows_its_model(tmp_path):
    async def test(operator):
        cluster = operator.cluster
        cluster.administration.hold.clear()
        response = await operator.client.delete("/admin/services/base")
        limits = cluster.limits.pop("base")  # a real cluster forgets them at once
        assert (await operator.service("base"))["model"] == "fake-base"
        cluster.limits["base"] = limits
        cluster.administration.hold.set()
        await operator.done(response)
        assert await operator.service("base") is None

    with_operator(test, tmp_path)


def test_unload_and_load(tmp_path):
    async def test(operator):
        for change, state in (("unload", "unloaded"), ("load", "ready")):
            operation = await operator.done(await operator.client.post(f"/admin/services/base/{change}"))
            assert (operation["kind"], operation["target"]) == (f"{change}_service", "base")
            assert (await operator.service("base"))["state"] == state
            error_of(await operator.client.post(f"/admin/services/else/{change}"), 404, "model_not_found")

    with_operator(test, tmp_path)


def test_pin_and_unpin(tmp_path):
    async def test(operator):
        for change, pinned in (("pin", True), ("pin", True), ("unpin", False)):
            operation = await operator.done(await operator.client.post(f"/admin/services/base/{change}"))
            assert (operation["kind"], operation["target"]) == (f"{change}_service", "base")
            assert (await operator.service("base"))["pinned"] is pinned
        error_of(await operator.client.post("/admin/services/else/pin"), 404, "model_not_found")
        failed = await operator.done(await operator.client.post("/admin/services/chat/pin"), "failed")
        assert failed["error"] == "engine 0: weights.memory is too small"
        assert (await operator.service("chat"))["pinned"] is False

    with_operator(test, tmp_path)


def test_a_service_is_placed_on_engines(tmp_path):
    async def test(operator):
        async def place(**body):
            return await operator.client.post("/admin/placement", json=body)

        operation = await operator.done(await place(service="chat", engines=["0"]))
        assert (operation["kind"], operation["target"]) == ("place_service", "chat")
        assert operator.cluster.administration.placed == [("chat", ("0",))]
        failed = await operator.done(await place(service="base", engines=["0"]), "failed")
        assert "engine 0 cannot load base" in failed["error"]
        error_of(await place(service="else", engines=["0"]), 404, "model_not_found")
        error_of(await place(service="chat", engines=["7"]), 404, "engine_not_found")
        assert "at least one engine" in error_of(await place(service="chat", engines=[]), 400)["message"]
        assert "must be given" in error_of(await place(service="chat"), 400)["message"]
        assert "unknown key" in error_of(await place(service="chat", engine="0"), 400)["message"]

    with_operator(test, tmp_path)


def test_a_placement_is_proposed_and_applied(tmp_path):
    async def test(operator):
        async def propose(command, state="done"):
            return await operator.done(await operator.client.post(f"/admin/placement/{command}"), state)

        changes = operator.cluster.administration
        failed = await propose("plan", "failed")
        assert failed["error"] == "no placement can be proposed: 3 requests came, fewer than 20"
        present, found = (Estimate({"chat": ServiceEstimate(10, missed, 10, 20.0)}) for missed in (5, 1))
        facts = IntervalFacts(
            length_s=60, services={}, requests=(ReplayedRequest("chat", 0, 3, 4, 4),) * 30, window_s=12.5
        )
        changes.proposal = Proposal(
            facts=facts, steps=[Step("chat", "b", True)], why="it is better", present=present, found=found
        )
        operation = await propose("plan")
        assert (operation["kind"], operation["target"]) == ("plan_placement", "of all services")
        assert (await operator.client.get("/admin/placement")).json()["proposal"] == {
            "steps": ["+chat on b"],
            "why": "it is better",
            "requests": 30,
            "window_s": 12.5,
            "present": {"attainment": 0.5, "normalised_latency": 2.0},
            "found": {"attainment": 0.9, "normalised_latency": 2.0},
        }
        assert (await propose("apply"))["kind"] == "apply_placement"
        assert changes.applied == [False, True]
        changes.hold.clear()
        running = await operator.client.post("/admin/placement/apply")
        error_of(await operator.client.post("/admin/placement/plan"), 409, "conflict")
        changes.hold.set()
        await operator.done(running)

    with_operator(test, tmp_path)


def test_a_service_may_be_removed_while_a_placement_is_applied(tmp_path):
    async def test(operator):
        found = Estimate({"chat": ServiceEstimate(10, 1, 10, 20.0)})
        operator.cluster.administration.proposal = Proposal(
            facts=IntervalFacts(length_s=60, services={}),
            steps=[Step("another", "0", False), Step("chat", "b", True)],
            why="it is better",
            present=found,
            found=found,
        )
        await operator.done(await operator.client.post("/admin/placement/apply"))

    with_operator(test, tmp_path)


def test_a_server_with_unloaded_services_is_healthy(tmp_path):
    async def test(operator):
        cluster = operator.cluster
        cluster.services = {service.name: UNLOADED for service in SERVICES}
        health = await operator.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "ok")
        assert (await operator.client.get("/health/ready?service=chat")).status_code == 200
        cluster.alive = False
        assert (await operator.client.get("/health")).status_code == 503
        assert (await operator.client.get("/health/ready")).status_code == 503

    with_operator(test, tmp_path)


def test_a_service_name_may_be_a_hub_id(tmp_path):
    async def test(operator):
        await operator.done(await operator.add(name="owner/model", model="smollm2"))
        await operator.done(await operator.client.post("/admin/services/owner/model/unload"))
        await operator.done(await operator.client.delete("/admin/services/owner%2Fmodel"))
        assert await operator.service("owner/model") is None

    with_operator(test, tmp_path)


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "model", "missing"),
        ({"model": "nonsense"}, "model", "there is no model 'nonsense'"),
        ({"model": "smollm2", "dtypo": 1}, "dtypo", "did you mean 'dtype'?"),
        ({"model": "smollm2", "dtype": "int9"}, "dtype", "expected one of"),
        ({"model": "smollm2", "max_model_len": 0}, "max_model_len", "at least 1"),
        ({"model": "smollm2", "max_model_len": True}, "max_model_len", "whole number"),
        ({"model": "smollm2", "slo": {"ttft": "soon"}}, "slo.ttft", "expected a time"),
        ({"model": "smollm2", "slo": {"e2e_scale": 3}}, "slo.e2e_scale", "execution"),
        ({"model": "smollm2", "slo": []}, "slo", "expected keys and values"),
        ({"model": "smollm2", "idle_after": "0s"}, "idle_after", "or never"),
        ({"model": "smollm2", "name": "a b"}, "name", "no spaces"),
        ({"model": ["smollm2"]}, "model", "got a list"),
        ({"model": "smollm2", "name": "x", "engines": [{}]}, "engines[0]", "got a mapping"),
        ({"model": "smollm2", "name": "x", "engines": []}, "engines", "at least one engine; there are: 0"),
    ],
)
def test_bodies_of_services_are_read_like_the_configuration(body, param, message, tmp_path):
    async def test(operator):
        error = error_of(await operator.add(**body), 400)
        assert (error["param"], message in error["message"]) == (param, True), error
        assert (await operator.get("operations"))["data"] == []

    with_operator(test, tmp_path)


@pytest.mark.parametrize("path", ["services", "engines"])
@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_json"),
        (b"{", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b'{"model": "\xff"}', 400, "invalid_json"),
        (b"[]", 400, None),
        (b'"smollm2"', 400, None),
        (b"null", 400, None),
        (b" " * (2**20 + 1), 413, "body_too_large"),
    ],
)
def test_bodies_that_are_not_objects(path, body, status, code, tmp_path):
    async def test(operator):
        headers = {"Content-Type": "application/json"}
        error_of(await operator.client.post(f"/admin/{path}", content=body, headers=headers), status, code)
        error_of(await operator.client.post(f"/admin/{path}", content=b"{}"), 415, "unsupported_media_type")

    with_operator(test, tmp_path)


def test_names_that_are_taken_or_unknown(tmp_path):
    async def test(operator):
        taken = error_of(await operator.add(name="base", model="smollm2"), 409, "conflict")
        assert "'base'" in taken["message"]
        unknown = error_of(await operator.add(**NEW, engines=["z"]), 404, "engine_not_found")
        assert (unknown["param"], "there are: 0" in unknown["message"]) == ("engines", True)
        error_of(await operator.client.get("/admin/operations/77"), 404, "operation_not_found")

    with_operator(test, tmp_path)


def test_engines_are_added_drained_and_removed(tmp_path):
    async def test(operator):
        client, cluster = operator.client, operator.cluster
        for asked in (client.delete("/admin/engines/0"), client.post("/admin/engines/0/drain")):
            assert "last one" in error_of(await asked, 409, "conflict")["message"]
        body = {"device": "cpu", "threads": 2, "kv_memory": "64MiB", "services": ["base"]}
        body["weights_memory"] = "32MiB"
        operation = await operator.done(await client.post("/admin/engines", json=body))
        assert (operation["kind"], operation["target"]) == ("add_engine", "1")
        [plan] = cluster.administration.plans
        assert [service.name for service in plan.options.services] == ["base"]
        assert (plan.options.threads, plan.options.kv_cache.memory_bytes) == (2, 64 << 20)
        assert plan.options.weights.memory_bytes == 32 << 20
        assert plan.options.memory_share == 0.5
        await operator.done(await client.post("/admin/engines", json={"device": "cuda", "name": "b"}))
        other = cluster.administration.plans[1].options
        assert (other.device, other.memory_share, len(other.services)) == ("cuda:0", 1, 2)

        cluster.administration.change("b", requests=2)
        response = await client.post("/admin/engines/b/drain")
        path = response.headers["location"]
        async with asyncio.timeout(60):
            while "2 requests" not in (await client.get(path)).json()["progress"]:
                await asyncio.sleep(0.005)
        assert cluster.engines[-1].state is EngineState.DRAINING
        error_of(await client.delete("/admin/engines/b"), 409, "conflict")
        await operator.done(await client.post("/admin/engines/b/undrain"))
        drained = await operator.done(response, "failed")
        assert "it was undrained" in drained["error"]
        assert cluster.engines[-1].state is EngineState.READY
        error_of(await client.post("/admin/engines/b/undrain"), 409, "conflict")
        response = await client.post("/admin/engines/b/drain")
        cluster.administration.change("b", requests=0)
        await operator.done(response)
        await operator.done(await client.post("/admin/engines/b/undrain"))
        error_of(await client.post("/admin/engines/b/activate"), 409, "conflict")
        await operator.done(await client.post("/admin/engines/b/standby"))
        assert cluster.engines[-1].state is EngineState.STANDBY
        assert (await client.get("/health")).json()["status"] == "ok"
        scale = {"wanted_engines": 2, "running_engines": 2, "engines": 3}
        assert (await client.get("/scale")).json() == scale
        await operator.done(await client.post("/admin/engines/b/activate"))
        assert cluster.engines[-1].state is EngineState.READY
        assert "shoal_wanted_engines 3.0" in (await client.get("/metrics")).text
        await operator.done(await client.delete("/admin/engines/b"))
        assert [engine["name"] for engine in (await operator.get("engines"))["data"]] == ["0", "1"]
        for path, call in (
            ("b", client.delete),
            ("b/drain", client.post),
            ("b/undrain", client.post),
            ("b/activate", client.post),
            ("b/standby", client.post),
        ):
            error_of(await call(f"/admin/engines/{path}"), 404, "engine_not_found")

    with_operator(test, tmp_path)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "device"),
        ({"device": "tpu"}, 400, "device"),
        ({"device": "cpu", "threads": 0}, 400, "threads"),
        ({"device": "cpu", "kv_memory": "much"}, 400, "kv_memory"),
        ({"device": "cpu", "services": []}, 400, "services"),
        ({"device": "cpu", "services": ["else"]}, 404, "services"),
        ({"device": "cpu", "port": 1}, 400, "port"),
        ({"device": "cpu", "name": "-"}, 400, None),
        ({"device": "cpu", "threads": 100_000}, 400, None),
        ({"device": "cpu", "name": "0"}, 409, None),
    ],
)
def test_bodies_of_engines(body, status, param, tmp_path):
    async def test(operator):
        response = await operator.client.post("/admin/engines", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param)

    with_operator(test, tmp_path)


def test_engines_are_added_to_simulated_ones(tmp_path):
    like_the_others = simulated_options(tmp_path)

    async def test(operator):
        client, cluster = operator.client, operator.cluster
        for device in ("simulated", "simulated:v100"):
            await operator.done(await client.post("/admin/engines", json={"device": device}))
        first, second = [plan.options for plan in cluster.administration.plans]
        assert first.device == second.device == "simulated"
        assert first.latency == like_the_others.latency
        assert second.latency.default.roofline.device == device_spec("v100")
        refused = error_of(await client.post("/admin/engines", json={"device": "cpu"}), 400)
        assert "cannot be beside others" in refused["message"]

    with_operator(test, tmp_path, engine_options=like_the_others)


def test_a_simulated_engine_is_not_added_to_others(tmp_path):
    async def test(operator):
        body = {"device": "simulated:h100"}
        refused = error_of(await operator.client.post("/admin/engines", json=body), 400)
        assert "cannot be beside others" in refused["message"]

    with_operator(test, tmp_path)


def test_null_names_all_engines_and_services(tmp_path):
    async def test(operator):
        await operator.done(await operator.add(**NEW, engines=None))
        assert operator.cluster.administration.added[0][3] is None
        body = {"device": "cpu", "services": None}
        await operator.done(await operator.client.post("/admin/engines", json=body))
        assert len(operator.cluster.administration.plans[0].options.services) == 3

    with_operator(test, tmp_path)


def test_the_history_of_operations_is_bounded(tmp_path):
    async def test(operator):
        operator.cluster.administration.hold.clear()
        first = await operator.client.post("/admin/services/chat/load")
        await until(lambda: operator.cluster.administration.held == 1)
        operator.cluster.administration.hold = asyncio.Event()
        operator.cluster.administration.hold.set()
        for _ in range(120):
            last = await operator.done(await operator.client.post("/admin/services/base/load"))
        operations = (await operator.get("operations"))["data"]
        assert len(operations) == 101
        assert [operations[0]["id"], operations[-1]["id"]] == [first.json()["id"], last["id"]]
        assert operations[0]["state"] == "running"

    with_operator(test, tmp_path)


def test_changes_are_for_operators_alone(tmp_path):
    async def test(operator):
        for method, path in (
            ("POST", "services"),
            ("POST", "services/base/unload"),
            ("DELETE", "services/base"),
            ("POST", "engines"),
            ("POST", "engines/0/drain"),
            ("POST", "engines/0/undrain"),
            ("POST", "engines/0/standby"),
            ("POST", "engines/0/activate"),
            ("DELETE", "engines/0"),
        ):
            response = await operator.client.request(method, f"/admin/{path}", json={})
            error_of(response, 401, "invalid_admin_key")
        assert (await operator.client.get("/metrics")).status_code == 200

    with_operator(test, tmp_path, admin_key="sk-admin")
