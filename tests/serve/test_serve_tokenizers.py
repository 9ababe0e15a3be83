"""Tokenizer processes: results, restarts after crashes, and shutdown."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress

import psutil
import pytest
import tokenizers
from serve_builders import until
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from shoal.core import InvalidRequest, ModelUnavailable, ServiceUnavailable
from shoal.models import Tokenizer
from shoal.models.tokenizer.messages import (
    HEADER,
    SHORT_BYTES,
    Encode,
    Encoded,
    decode_reply,
    encode,
)
from shoal.models.tokenizer.process import _Process
from shoal.serve import tokenizer_subprocess
from shoal.serve.tokenizers import Tokenizers

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


def make_folder(folder, letters="abcdefghij <>", **config):
    """A model's folder with a tokenizer of letters, whose end token is special."""
    folder.mkdir(exist_ok=True)
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    names = {"chat_template": TEMPLATE, "eos_token": "</s>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@asynccontextmanager
async def processes():
    made = Tokenizers()
    try:
        yield made
    finally:
        await made.aclose()


def pid_of(made, number=0):
    return list(made._workers.values())[number]._starting.result().pid


def run(scenario):
    async def main():
        async with processes() as made, asyncio.timeout(120):
            await scenario(made)
        assert not [child for child in psutil.Process().children() if "tokenizer_process" in command(child)]

    asyncio.run(main())


def command(process):
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def test_results_equal_the_tokenizers(tmp_path):
    folder = make_folder(tmp_path, add_bos_token=True, bos_token="</s>")
    own = Tokenizer.from_folder(folder)
    long = "abcdefghij " * 5000  # answered in a thread

    async def scenario(made):
        served = await made.load(folder)
        for texts in (["ab", "", "</s>a"], [long]):
            for special in (True, False):
                expected = [own.encode(text, special) for text in texts]
                assert (await served.encode_texts(texts, special)).tokens == expected
        assert own.encode("a") == [own.bos_token_id, own.encode("a")[1]]
        told = await served.tokenize("a b</s>", False, True)
        assert (told.count, told.tokens, told.strings) == (4, b"[0,10,1,13]", b'["a"," ","b","</s>"]')
        assert await served.encode_texts(["a", long], False, 20) == Encoded([[0]], 2**14)
        tokens = own.encode(f"{long}</s>")
        assert await served.detokenize(tokens) == own.decode(tokens, skip_special_tokens=False)
        assert served.decode(tokens) == own.decode(tokens)
        assert served.token_bytes(0) == b"a"
        assert (served.special_token("</s>"), served.special_token("a")) == (13, None)
        assert served.chat_template.render([{"role": "user", "content": "hi"}]) == "<user>hi"
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            await served.encode_texts(["a\ud800"])

    run(scenario)


def test_no_tokenizer_is_read_in_the_process_of_the_server(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("this would stop all streams")

    for name in ("from_file", "from_str", "from_buffer"):
        monkeypatch.setattr(tokenizers.Tokenizer, name, refuse)

    async def scenario(made):
        served = await made.load(folder)
        assert (await served.encode_texts(["ab"])).tokens == [[0, 1]]
        assert served.decode([0, 1]) == "ab"

    folder = make_folder(tmp_path)
    run(scenario)


def test_services_with_the_same_tokenizer_share_a_process(tmp_path):
    first = make_folder(tmp_path / "a")
    second = make_folder(tmp_path / "b", chat_template=None)
    other = make_folder(tmp_path / "c", "abc")

    async def scenario(made):
        # The other comes last, so that the process that they share is the first.
        served = [*await asyncio.gather(made.load(first), made.load(second)), await made.load(other)]
        assert [one.has_chat_template for one in served] == [True, False, True]
        assert len(made._workers) == 2
        pid = pid_of(made)
        served[0].close()
        assert (await served[1].encode_texts(["ab"])).tokens == [[0, 1]]
        served[1].close()
        await until(lambda: not psutil.pid_exists(pid))
        with pytest.raises(InvalidRequest) as caught:
            await served[1].encode_texts(["ab"])
        assert caught.value.code == "model_not_found"
        assert served[1].decode([0, 1]) == "ab"  # running requests are decoded to their end
        assert (await served[2].encode_texts(["ab"])).tokens == [[0, 1]]

    run(scenario)


@pytest.mark.parametrize("text", ["a", "ab" * SHORT_BYTES], ids=["short", "long"])
def test_a_process_that_is_killed_is_replaced(tmp_path, text):
    folder = make_folder(tmp_path)
    tokens = Tokenizer.from_folder(folder).encode(text)

    async def scenario(made):
        served = await made.load(folder)
        before = pid_of(made)
        os.kill(before, signal.SIGSTOP)  # so that there is no reply before
        asking = asyncio.create_task(served.encode_texts([text]))
        (worker,) = made._workers.values()
        await until(lambda: worker._starting.result()._pending)
        os.kill(before, signal.SIGKILL)
        assert (await asking).tokens == [tokens]
        assert pid_of(made) != before
        os.kill(pid_of(made), signal.SIGKILL)
        await until(lambda: not worker._starting.result().alive)
        assert (await served.encode_texts([text])).tokens == [tokens]

    run(scenario)


def test_a_process_that_is_stopped_is_replaced(tmp_path, monkeypatch):
    kill = tokenizer_subprocess.kill_child

    def kill_once(process):
        monkeypatch.setattr(tokenizer_subprocess, "_STALL_TIMEOUT_S", 60.0)
        kill(process)

    async def scenario(made):
        served = await made.load(make_folder(tmp_path))
        before = pid_of(made)
        os.kill(before, signal.SIGSTOP)
        monkeypatch.setattr(tokenizer_subprocess, "_STALL_TIMEOUT_S", 0.1)
        monkeypatch.setattr(tokenizer_subprocess, "kill_child", kill_once)
        assert (await served.encode_texts(["ab"])).tokens == [[0, 1]]
        assert not psutil.pid_exists(before)

    run(scenario)


def test_a_message_that_crashes_every_process_gets_an_error(tmp_path, monkeypatch):
    ask, asked, reading = tokenizer_subprocess.TokenizerSubprocess.ask, [], []

    async def killing(child, message):
        if reading or len(message) > SHORT_BYTES:
            asked.append(child.pid)
            os.kill(child.pid, signal.SIGKILL)
        return await ask(child, message)

    async def scenario(made):
        served = await made.load(make_folder(tmp_path))
        monkeypatch.setattr(tokenizer_subprocess.TokenizerSubprocess, "ask", killing)
        with pytest.raises(ServiceUnavailable, match="ended 2 times"):
            await served.encode_texts(["ab" * SHORT_BYTES])
        assert len(set(asked)) == 2
        assert (await served.encode_texts(["ab"])).tokens == [[0, 1]]

        reading.append(True)
        with pytest.raises(ModelUnavailable, match="ended 2 times"):
            await made.load(make_folder(tmp_path, "ab"))
        with pytest.raises(ServiceUnavailable, match="ended 2 times"):
            await served.encode_texts(["ab"])

    run(scenario)


def test_an_unreadable_tokenizer_is_named(tmp_path):
    folder = make_folder(tmp_path)

    async def scenario(made):
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(ModelUnavailable, match=r"tokenizer\.json cannot be read"):
            await made.load(folder)
        assert not made._workers

        served = await made.load(make_folder(tmp_path))
        make_folder(tmp_path, "ba")
        os.kill(pid_of(made), signal.SIGKILL)
        (worker,) = made._workers.values()
        await until(lambda: not worker._starting.result().alive)
        with pytest.raises(ServiceUnavailable, match=r"tokenizer\.json has been replaced"):
            await served.encode_texts(["ab"])
        make_folder(tmp_path)
        assert (await served.encode_texts(["ab"])).tokens == [[0, 1]]

    run(scenario)


def test_short_texts_do_not_wait_for_long_ones():
    ours, its_end = socket.socketpair()
    allowed = threading.Event()

    class Slow:
        def encode(self, text, add_special_tokens):
            assert len(text) < SHORT_BYTES or allowed.wait(60)
            return [len(text)]

    process = _Process(its_end)
    process._tokenizer = Slow()
    thread = threading.Thread(target=process.run)
    thread.start()
    for number, size in enumerate((SHORT_BYTES, 3)):
        message = encode(Encode(["a" * size], True, None))
        ours.sendall(HEADER.pack(number, len(message)) + message)
    with ours.makefile("rb") as source:

        def answer():
            number, length = HEADER.unpack(source.read(HEADER.size))
            return number, decode_reply(source.read(length))

        assert answer() == (1, Encoded([[3]]))
        allowed.set()
        assert answer() == (0, Encoded([[SHORT_BYTES]]))
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


def test_long_texts_are_sent_one_at_a_time(tmp_path, monkeypatch):
    asked = []

    async def scenario(made):
        served = await made.load(make_folder(tmp_path))
        child = next(iter(made._workers.values()))._starting.result()
        release = asyncio.Event()

        async def ask(message):
            asked.append(len(message) > 2**18)
            await release.wait()
            return encode(Encoded([[len(asked)]]))

        monkeypatch.setattr(child, "ask", ask)
        texts = ["a" * size for size in (2**19, 2**19, 2**15, 2**15, 9, 9)]
        asking = [asyncio.create_task(served.encode_texts([text])) for text in texts]
        await until(lambda: len(asked) == 4)
        for _ in range(20):
            await asyncio.sleep(0)
        assert sorted(asked) == [False, False, False, True]  # one large, one of middle size, both short
        asking[1].cancel()  # a cancelled task is not waited for
        release.set()
        await asyncio.gather(*asking, return_exceptions=True)
        assert sorted(asked) == [False, False, False, False, True]

    run(scenario)


PROGRAM = """
import asyncio, pathlib, sys
from shoal.serve.tokenizers import Tokenizers
async def main():
    made = Tokenizers()
    served = await made.load(pathlib.Path(sys.argv[1]))
    (worker,) = made._workers.values()
    print(worker._starting.result().pid, flush=True)
    sys.stdin.readline()
    await served.encode_texts(["ab"])
    print(worker._starting.result().pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def test_no_process_outlives_a_server_that_is_killed(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = [sys.executable, "-c", PROGRAM, str(make_folder(tmp_path))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(arguments, env=environment, text=True, **pipes) as server:
        process = psutil.Process(int(server.stdout.readline()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)  # as a terminal or a service manager sends to all
        server.stdin.write("\n")
        server.stdin.flush()
        assert int(server.stdout.readline()) == process.pid
        server.kill()
        process.wait(60)


def test_the_process_imports_little():
    code = "import sys, shoal.models.tokenizer.process; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "fastapi", "numpy"} & set(done.stdout.split())
