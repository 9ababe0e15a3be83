"""Ollama's API for models: list, show, pull, delete, keep_alive."""

import asyncio
import json
import time
from dataclasses import replace
from datetime import UTC, datetime

import ollama
import pytest
from admin_builders import LOADING, READY, UNLOADED, ChangingCluster, Operator
from serve_builders import serving_in_thread
from weights_status import engine_with_weights

from shoal.cluster.status import EngineState, EngineStatus, ServiceState
from shoal.config.api_keys import ApiKey
from shoal.engine.info import EngineInfo
from shoal.models import ModelDescription
from shoal.schedule.policies.residency import Place

DESCRIBED = ModelDescription(
    family="qwen3",
    format="gguf",
    parameters=596_049_920,
    quantisation="Q8_0",
    size_bytes=639_446_688,
    digest="ab" * 32,
    modified_s=1_700_000_000,
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    vocab_size=151_936,
)
DETAILS = {
    "parent_model": "fake-chat",
    "format": "gguf",
    "family": "qwen3",
    "families": ["qwen3"],
    "parameter_size": "596.05M",
    "quantization_level": "Q8_0",
}
GREEDY = {"temperature": 0}
MESSAGES = [{"role": "user", "content": "hi"}]
EMPTY = {"chat": {"messages": []}, "generate": {"prompt": ""}, "embed": {}, "embeddings": {}}
ASKING = {
    "chat": {"messages": MESSAGES, "options": GREEDY},
    "generate": {"prompt": "hi", "options": GREEDY},
    "embed": {"input": "hi"},
    "embeddings": {"prompt": "hi"},
}


def with_operator(test, folder, cluster=None, **options):
    async def main():
        async with Operator(cluster or ChangingCluster(), folder, **options) as operator:
            return await test(operator)

    return asyncio.run(main())


def described_cluster(**fields):
    cluster = ChangingCluster(**fields)
    cluster.limits["chat"] = replace(cluster.limits["chat"], weight_bytes=600, described=DESCRIBED)
    return cluster


def engine(name, device, cluster, state=EngineState.READY, services=("chat", "base")):
    info = EngineInfo(
        services={service: cluster.limits[service] for service in services},
        device=device,
        threads=1,
        block_size=16,
        merged_blocks=1,
        kv_bytes=1,
        weight_bytes=1,
    )
    return EngineStatus(name=name, state=state, services=services, device=device, info=info)


def read(folder, path, cluster=None):
    async def test(operator):
        response = await operator.client.get(path)
        assert response.status_code == 200
        return response.json()

    return with_operator(test, folder, cluster)


def show(folder, cluster=None, **body):
    async def test(operator):
        return (await operator.client.post("/api/show", json=body)).json()

    return with_operator(test, folder, cluster)


def test_models_are_listed_with_their_sizes(tmp_path):
    chat, base = read(tmp_path, "/api/tags", described_cluster())["models"]
    assert chat == {
        "name": "chat:latest",
        "model": "chat:latest",
        "digest": "ab" * 32,
        "modified_at": "2023-11-14T22:13:20Z",
        "size": 639_446_688,
        "details": DETAILS,
    }
    assert base["name"] == "base:latest"
    assert base["details"] == dict.fromkeys(DETAILS, "") | {"parent_model": "fake-base", "families": []}


@pytest.mark.parametrize(
    ("parameters", "short"),
    [
        (134_515_008, "134.52M"),
        (8_030_261_248, "8.0B"),
        (7_000_000_000, "7B"),
        (1_000_000, "1M"),
        (37_500, "38K"),
        (12, "12"),
    ],
)
def test_sizes_are_short(tmp_path, parameters, short):
    cluster = described_cluster()
    cluster.limits["chat"] = replace(
        cluster.limits["chat"], described=replace(DESCRIBED, parameters=parameters)
    )
    chat, _ = read(tmp_path, "/api/tags", cluster)["models"]
    assert chat["details"]["parameter_size"] == short


def test_only_loaded_services_are_running(tmp_path):
    cluster = described_cluster()
    for state in (UNLOADED, LOADING, replace(READY, state=ServiceState.FAILED, ready=0)):
        cluster.administration.set("chat", state)
        names = [model["name"] for model in read(tmp_path, "/api/ps", cluster)["models"]]
        assert names == ["base:latest"]
        assert len(read(tmp_path, "/api/tags", cluster)["models"]) == 2
    for state in (READY, replace(READY, state=ServiceState.DRAINING)):
        cluster.administration.set("chat", state)
        assert len(read(tmp_path, "/api/ps", cluster)["models"]) == 2


def test_running_models_have_their_size_in_memory(tmp_path):
    cluster = described_cluster()
    cluster.others = [
        engine("a", "cpu", cluster),
        engine("b", "cuda:0", cluster, EngineState.DRAINING),
        engine("c", "cuda:1", cluster, services=("base",)),
        engine("d", "cuda:2", cluster, EngineState.WAITING),
    ]
    chat = read(tmp_path, "/api/ps", cluster)["models"][0]
    assert (chat["size"], chat["size_vram"]) == (1200, 600)


def test_only_resident_weights_are_running(tmp_path):
    cluster = described_cluster()
    places = {"chat": Place.RESIDENT, "base": Place.ABSENT}
    cluster.others = [engine_with_weights("a", places, infos=cluster.limits, device="cuda:0")]
    [chat] = read(tmp_path, "/api/ps", cluster)["models"]
    assert (chat["name"], chat["size_vram"]) == ("chat:latest", 600)
    assert len(read(tmp_path, "/api/tags", cluster)["models"]) == 2
    coming = {"chat": Place.COMING, "base": Place.RESIDENT}
    cluster.others.append(engine_with_weights("b", coming, infos=cluster.limits))
    chat, base = read(tmp_path, "/api/ps", cluster)["models"]
    assert (chat["size"], base["name"]) == (600, "base:latest")
    assert (chat["digest"], chat["details"]) == ("ab" * 32, DETAILS)
    assert chat["context_length"] == 200


def expires_in_s(folder, **status):
    cluster = described_cluster()
    cluster.administration.set("chat", replace(READY, **status))
    expires = read(folder, "/api/ps", cluster)["models"][0]["expires_at"]
    return (datetime.fromisoformat(expires) - datetime.now(UTC)).total_seconds()


def test_running_models_have_an_expiry_time(tmp_path):
    # The margins are for slow machines.
    minute_ago_ns = time.monotonic_ns() - 60 * 10**9
    assert 100 < expires_in_s(tmp_path, idle_after_s=300.0, idle_since_ns=minute_ago_ns) < 241
    assert 200 < expires_in_s(tmp_path, idle_after_s=300.0, idle_since_ns=None) < 301
    assert expires_in_s(tmp_path) > 100 * 365 * 86_400


@pytest.mark.parametrize("body", [{"model": "chat"}, {"name": "chat:latest"}, {"model": "", "name": "chat"}])
def test_a_model_is_shown_by_either_name(tmp_path, body):
    shown = show(tmp_path, described_cluster(), **body)
    assert shown["details"] == DETAILS
    assert shown["capabilities"] == ["completion", "tools"]
    assert "message.content" in shown["template"]
    assert shown["modified_at"] == "2023-11-14T22:13:20Z"
    assert "num_ctx                        200" in shown["parameters"].splitlines()
    assert shown["model_info"] == {
        "general.basename": "chat",
        "general.architecture": "qwen3",
        "general.parameter_count": 596_049_920,
        "qwen3.context_length": 200,
        "qwen3.block_count": 28,
        "qwen3.embedding_length": 1024,
        "qwen3.attention.head_count": 16,
        "qwen3.attention.head_count_kv": 8,
        "qwen3.vocab_size": 151_936,
    }


def test_models_without_a_description_are_shown_too(tmp_path):
    shown = show(tmp_path, model="base")
    assert shown["model_info"]["shoal.context_length"] == 200
    assert shown["capabilities"] == ["completion"]
    assert "template" not in shown
    assert show(tmp_path)["error"] == "model is missing"


def test_the_index_names_the_routes(tmp_path):
    routes = read(tmp_path, "/")["routes"]
    assert {"POST /api/chat", "GET /api/ps", "POST /api/pull", "DELETE /api/delete"} <= set(routes)


def test_the_version_is_one_that_clients_of_ollama_know(tmp_path):
    version = tuple(map(int, read(tmp_path, "/api/version")["version"].split(".")))
    assert (0, 12, 10) <= version < (0, 12, 11)  # ids of calls, and no log-probabilities


@pytest.mark.parametrize("path", EMPTY)
@pytest.mark.parametrize("nothing", [0, 0.0, "0", "0s", "0h0m"])
def test_a_keep_alive_of_0_unloads(tmp_path, path, nothing):
    async def test(operator):
        client = operator.client
        answer = await client.post(
            f"/api/{path}", json={"model": "chat", "keep_alive": nothing} | EMPTY[path]
        )
        assert answer.status_code == 200
        if path in ("chat", "generate"):
            assert (answer.json()["done"], answer.json()["done_reason"]) == (True, "unload")
        assert [model["name"] for model in (await client.get("/api/ps")).json()["models"]] == ["base:latest"]

    with_operator(test, tmp_path)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKING)
def test_keep_alive_applies_after_the_response(tmp_path, path, stream):
    async def test(operator):
        body = {"model": "base", "keep_alive": 0, **ASKING[path]} | ({"stream": True} if stream else {})
        if path == "chat":
            body["model"] = "chat"
        if path.startswith("embed"):
            body.pop("stream", None)
        states = []
        submit = operator.cluster.submit

        async def watched(service, *arguments, **fields):
            states.append(operator.cluster.services[service].state)
            return await submit(service, *arguments, **fields)

        operator.cluster.submit = watched
        answer = await operator.client.post(f"/api/{path}", json=body)
        assert answer.status_code == 200, answer.text
        assert states == [ServiceState.READY]
        assert operator.cluster.administration.kept == [(body["model"], 0)]

    with_operator(test, tmp_path)


def kept(folder, keep_alive, headers=None, cluster=None, path="chat", body=None, **options):
    """The response, and the changes of keep_alive that reached the engines."""
    cluster = cluster or ChangingCluster()

    async def test(operator):
        asked = {"model": "chat", "keep_alive": keep_alive, **(ASKING[path] if body is None else body)}
        answer = await operator.client.post(f"/api/{path}", json=asked, headers=headers)
        return answer, cluster.administration.kept

    return with_operator(test, folder, cluster, **options)


@pytest.mark.parametrize(
    ("keep_alive", "seconds"),
    [
        (300, 300.0),
        (1.5, 1.5),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("20", 20.0),
        (-1, None),
        ("-1", None),
        ("-1m", None),
        (1e300, None),
    ],
)
@pytest.mark.parametrize("body", [None, {}])
def test_operators_set_keep_alive(tmp_path, keep_alive, seconds, body):
    answer, changes = kept(tmp_path, keep_alive, body=body)
    assert (answer.status_code, changes) == (200, [("chat", pytest.approx(seconds))])


@pytest.mark.parametrize(
    "keep_alive", ["soon", "5 minutes", "5x", "m", "", "1" * 100, True, [], "-", "1h-3m"]
)
def test_invalid_keep_alives_are_refused(tmp_path, keep_alive):
    answer, changes = kept(tmp_path, keep_alive)
    assert (answer.status_code, changes) == (400, [])
    assert answer.json()["error"].startswith("keep_alive")


def test_without_keep_alive_nothing_changes(tmp_path):
    answer, changes = kept(tmp_path, None)
    assert (answer.status_code, changes) == (200, [])


KEYED = {"api_keys": (ApiKey(key="client", name="alice"),), "admin_key": "boss"}
CLIENT, BOSS = {"Authorization": "Bearer client"}, {"Authorization": "Bearer boss"}


@pytest.mark.parametrize("path", ASKING)
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        (None, {"admin_key": "boss"}, 401),
        (BOSS, {"admin_key": "boss"}, 200),
        (CLIENT, KEYED, 403),
        (BOSS, KEYED, 200),
        ({"X-Forwarded-For": "10.0.0.1"}, {}, 403),
        ({"Origin": "http://localhost:3000"}, {}, 403),
    ],
)
def test_only_operators_unload_models(tmp_path, path, empty, headers, options, status):
    cluster = ChangingCluster()
    answer, changes = kept(tmp_path, 0, headers, cluster, path, EMPTY[path] if empty else None, **options)
    assert answer.status_code == status, answer.text
    if status != 200:
        assert changes == cluster.submitted == []
        assert answer.json()["error"].startswith("keep_alive: 0 unloads the model for everybody: ")
    # Clients send other durations with every request, which are ignored.
    for time_s in ("5m", -1):
        answer, changes = kept(
            tmp_path, time_s, headers, None, path, EMPTY[path] if empty else None, **options
        )
        assert (answer.status_code, len(changes)) == (200, status == 200)


def test_a_request_without_a_prompt_loads_the_model(tmp_path):
    cluster = ChangingCluster()
    for path, body in EMPTY.items():
        cluster.administration.set("chat", UNLOADED)
        answer, _ = kept(tmp_path, None, cluster=cluster, path=path, body=body)
        assert answer.status_code == 200
        assert cluster.services["chat"].state is ServiceState.READY


def lines(response):
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.mark.parametrize("field", ["model", "name"])
def test_models_are_pulled_and_served(tmp_path, field):
    async def test(operator):
        response = await operator.client.post("/api/pull", json={field: "smollm2:latest"})
        assert response.headers["content-type"] == "application/x-ndjson"
        changes = lines(response)
        assert changes[-1] == {"status": "success"}
        assert all(line["status"] for line in changes)
        assert "smollm2:latest" in [
            m["name"] for m in (await operator.client.get("/api/tags")).json()["models"]
        ]
        assert operator.pulled == ["smollm2"]
        # Again: it is served already.
        for body in ({"model": "smollm2"}, {"model": "smollm2", "stream": False}):
            assert lines(await operator.client.post("/api/pull", json=body)) == [{"status": "success"}]
        assert operator.pulled == ["smollm2"]

    with_operator(test, tmp_path)


def test_a_pull_reports_progress(tmp_path):
    async def test(operator):
        operator.release.clear()
        pulling = asyncio.create_task(operator.client.post("/api/pull", json={"model": "smollm2"}))
        joined = asyncio.create_task(operator.client.post("/api/pull", json={"model": "smollm2"}))
        async with asyncio.timeout(60):
            while not any(o["progress"] == "downloading" for o in (await operator.get("operations"))["data"]):
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.3)
        operator.release.set()
        for response in (await pulling, await joined):
            assert {"status": "downloading", "total": 4, "completed": 1} in lines(response)
            assert lines(response)[-1] == {"status": "success"}
        assert operator.pulled == ["smollm2"]

    with_operator(test, tmp_path)


def test_models_of_the_hub_have_ollama_s_names(tmp_path):
    async def test(operator):
        response = await operator.client.post(
            "/api/pull", json={"model": "hf.co/owner/tiny", "stream": False}
        )
        # The fake cluster loads only one model.
        assert "service 'hf.co/owner/tiny' cannot be loaded" in response.json()["error"]
        (operation,) = (await operator.get("operations"))["data"]
        assert operation["target"] == "hf.co/owner/tiny"

    with_operator(test, tmp_path)


@pytest.mark.parametrize("stream", [False, True])
def test_models_that_cannot_be_pulled(tmp_path, stream):
    async def test(operator):
        post = operator.client.post
        missing = await post("/api/pull", json={"model": "no such model", "stream": stream})
        assert (missing.status_code, list(missing.json())) == (400, ["error"])
        unknown = await post("/api/pull", json={"model": "nothing", "stream": stream})
        assert unknown.status_code == 400
        assert "there is no model 'nothing'" in unknown.json()["error"]
        failing = await post("/api/pull", json={"model": "gemma3-270m", "stream": stream})
        assert failing.status_code == (200 if stream else 409)
        assert "out of luck" in lines(failing)[-1]["error"]

    with_operator(test, tmp_path)


@pytest.mark.parametrize("field", ["model", "name"])
def test_models_are_deleted(tmp_path, field):
    async def test(operator):
        async def delete(name):
            return await operator.client.request("DELETE", "/api/delete", content=json.dumps({field: name}))

        assert (await delete("chat:latest")).status_code == 200
        assert [m["name"] for m in (await operator.client.get("/api/tags")).json()["models"]] == [
            "base:latest"
        ]
        assert (await delete("chat")).status_code == 404
        last = await delete("base")
        assert (last.status_code, "last one" in last.json()["error"]) == (409, True)

    with_operator(test, tmp_path)


@pytest.mark.parametrize(
    ("headers", "options", "status"),
    [
        (None, {"admin_key": "boss"}, 401),
        (CLIENT, KEYED, 403),
        ({"X-Forwarded-For": "10.0.0.1"}, {}, 403),
        (BOSS, KEYED, 200),
        (None, {}, 200),
    ],
)
def test_only_operators_pull_and_delete(tmp_path, headers, options, status):
    async def test(operator):
        pulled = await operator.client.post(
            "/api/pull", json={"model": "smollm2", "stream": False}, headers=headers
        )
        deleted = await operator.client.request(
            "DELETE", "/api/delete", json={"model": "chat"}, headers=headers
        )
        assert (pulled.status_code, deleted.status_code) == (status, status)
        assert ("chat" not in operator.cluster.services) == (status == 200)
        if status != 200:
            assert list(pulled.json()) == ["error"]
            assert operator.pulled == []

    with_operator(test, tmp_path, **options)


def test_the_admin_key_is_none_of_openai_s_api(tmp_path):
    async def test(operator):
        tags = await operator.client.get("/api/tags", headers=BOSS)
        assert (tags.status_code, len(tags.json()["models"])) == (200, 2)
        assert (await operator.client.get("/v1/models", headers=BOSS)).status_code == 401
        assert (await operator.client.get("/api/tags")).status_code == 401

    with_operator(test, tmp_path, **KEYED)


def test_ollama_s_client_lists_shows_and_unloads():
    cluster = described_cluster()
    with serving_in_thread(cluster) as url:
        client = ollama.Client(host=url)
        chat, _ = client.list().models
        assert (chat.model, chat.size, chat.details.family) == ("chat:latest", 639_446_688, "qwen3")
        assert client.show("chat").modelinfo["qwen3.context_length"] == 200
        assert [model.model for model in client.ps().models] == ["chat:latest", "base:latest"]
        assert client.generate(model="chat", keep_alive=0).done_reason == "unload"
        assert [model.model for model in client.ps().models] == ["base:latest"]
        assert client.delete("chat").status == "success"
        with pytest.raises(ollama.ResponseError, match="there is no model 'nothing'"):
            client.pull("nothing")
