"""/v1/embeddings: shapes, encodings, inputs, errors, and many inputs."""

import asyncio
import base64
import struct

import pytest
from serve_builders import BOS, FIRST_BYTE, FakeEngine, make_app, make_client, post

EMBEDDINGS = "/v1/embeddings"


def ask(body, engine=None, status=200):
    response = asyncio.run(post(EMBEDDINGS, {"model": "base"} | body, engine))
    assert response.status_code == status, response.text
    return response.json()


def vector(length: int) -> list[float]:
    """The fake engine's embedding of a prompt with this many tokens."""
    return [0.0, 0.5, float(length)]


def test_embedding_has_openais_shape():
    engine = FakeEngine()
    assert ask({"input": "abc"}, engine) == {
        "object": "list",
        "model": "base",
        "data": [{"object": "embedding", "index": 0, "embedding": vector(4)}],
        "usage": {"prompt_tokens": 4, "total_tokens": 4},
    }
    assert engine.submitted[0].prompt[0] == BOS
    assert engine.submitted[0].sampling.max_tokens == 1


def test_every_kind_of_input():
    for sent, lengths in (
        ("ab", [3]),
        (["ab", "", "a"], [3, 1, 2]),
        ([5, 6, 7], [3]),
        ([[5, 6, 7], [8]], [3, 1]),
    ):
        data = ask({"input": sent})["data"]
        assert [entry["embedding"] for entry in data] == [vector(length) for length in lengths]
        assert [entry["index"] for entry in data] == list(range(len(lengths)))
    assert ask({"input": "ab", "add_special_tokens": False})["data"][0]["embedding"] == vector(2)
    assert ask({"input": "a" * 900, "truncate_prompt_tokens": 7})["data"][0]["embedding"] == vector(7)
    assert ask({"input": "a" * 900, "truncate_prompt_tokens": -1})["data"][0]["embedding"] == vector(199)


def test_base64_is_of_float32():
    entry = ask({"input": "abc", "encoding_format": "base64"})["data"][0]
    assert list(struct.unpack("<3f", base64.b64decode(entry["embedding"]))) == vector(4)


def test_many_inputs_are_submitted_in_batches():
    engine = FakeEngine(max_queue=64)
    texts = ["x" * (number % 7) for number in range(1000)]
    data = ask({"input": texts}, engine)["data"]
    assert [entry["embedding"] for entry in data] == [vector(1 + len(text)) for text in texts]
    assert engine.waiting == 0


def test_a_disconnect_cancels_the_request():
    async def main() -> None:
        engine = FakeEngine(hold=asyncio.Event())
        async with make_client(make_app(engine)) as client:
            task = asyncio.create_task(client.post(EMBEDDINGS, json={"model": "base", "input": ["a", "b"]}))
            async with asyncio.timeout(60):
                while engine.paused < 2:
                    await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert sorted(engine.cancelled) == sorted(request.id for request in engine.submitted)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": None}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": [FIRST_BYTE + 256]}, "input"),
        ({"input": "a" * 300}, "input"),
        ({"input": "", "add_special_tokens": False}, "input"),
        ({"input": [5] * 300}, "input"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "encoding_fromat": "float"}, "encoding_fromat"),
        ({"input": "a", "normalize": False}, "normalize"),
        ({"input": "a", "output_dimension": 64}, "output_dimension"),
        ({}, "input"),
    ],
)
def test_wrong_fields_are_named(fields, param):
    assert ask(fields, status=400)["error"]["param"] == param


def test_dimensions_are_refused_with_the_reason():
    assert "trained for that" in ask({"input": "a", "dimensions": 5}, status=400)["error"]["message"]


def test_failures_are_those_of_generations():
    assert ask({"model": "other", "input": "a"}, status=404)["error"]["code"] == "model_not_found"
    assert ask({"input": "a"}, FakeEngine(error_after=0), status=500)["error"]["code"] == "generation_failed"
    assert ask({"input": "a"}, FakeEngine(alive=False), status=503)["error"]["code"] == "service_unavailable"
