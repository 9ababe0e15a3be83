import asyncio
import io
from types import SimpleNamespace

import pytest
import tokenizers
from cli_builders import FakeApi, fake_server
from rich.console import Console
from tokenizers.models import WordLevel
from typer.testing import CliRunner

from shoal.cli.app import app, run
from shoal.cli.chat import _read_line, converse
from shoal.cli.demo.run import free_port
from shoal.cli.progress import ProgressDisplay
from shoal.core import InvalidRequest
from shoal.models import Tokenizer


class FakeChatClient:
    """Replies with the number of messages it got; ``fail`` is raised once instead."""

    name = "fake"

    def __init__(self, fail=None):
        self.seen, self.fail, self.closed = [], fail, False

    async def reply(self, messages, sampling):
        self.seen.append([dict(message) for message in messages])
        if self.fail is not None:
            fail, self.fail = self.fail, None
            raise fail
        yield "reply "
        yield str(len(messages))

    async def close(self):
        self.closed = True


def chat_with(client, *lines, start=()):
    script = iter(lines)

    def read_line():
        try:
            return next(script)
        except StopIteration:
            raise EOFError from None

    with asyncio.Runner() as runner:
        converse(runner, client, list(start), {}, read_line)
    return client.seen


def test_a_conversation_keeps_its_history(capsys):
    seen = chat_with(FakeChatClient(), "one", "  ", "two", start=[{"role": "system", "content": "s"}])
    assert [message["role"] for message in seen[1]] == ["system", "user", "assistant", "user"]
    assert seen[1][2]["content"] == "reply 2"
    assert capsys.readouterr().out == "reply 2\nreply 4\n"


def test_reset_keeps_only_the_system_prompt():
    seen = chat_with(FakeChatClient(), "one", "/reset", "two", start=[{"role": "system", "content": "s"}])
    assert [message["content"] for message in seen[1]] == ["s", "two"]


@pytest.mark.parametrize("word", ["/exit", "/quit"])
def test_exit_ends_the_chat(word):
    assert len(chat_with(FakeChatClient(), "one", word, "two")) == 1


def test_a_rejected_message_is_dropped_and_the_chat_continues(capsys):
    seen = chat_with(FakeChatClient(InvalidRequest("too long")), "one", "two", "/help")
    assert [message["content"] for message in seen[1]] == ["two"]
    captured = capsys.readouterr()
    assert "too long" in captured.err
    assert "/reset" in captured.err


def test_ctrl_c_keeps_the_text_so_far():
    class Interrupted(FakeChatClient):
        async def reply(self, messages, sampling):
            self.seen.append([dict(message) for message in messages])
            yield "half"
            if len(self.seen) == 1:
                raise KeyboardInterrupt

    seen = chat_with(Interrupted(), "one", "two")
    assert [message["content"] for message in seen[1]] == ["one", "half", "two"]


def test_chat_with_a_running_server():
    api = FakeApi()
    with fake_server(api) as url:
        arguments = ["chat", "--url", url, "--system", "be kind", "--seed", "3", "--max-tokens", "9"]
        result = CliRunner().invoke(app, arguments, input="hi\nagain\n", catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stdout == "Hello there!\nHello there!\n"
    first, second = api.bodies
    assert (first["model"], first["seed"], first["max_tokens"], first["stream"]) == ("chat", 3, 9, True)
    assert not {"temperature", "top_p"} & first.keys(), "the service's defaults hold"
    assert [message["content"] for message in second["messages"]] == [
        "be kind",
        "hi",
        "Hello there!",
        "again",
    ]


def test_chat_names_the_service_of_a_server():
    api = FakeApi(reject={"complete": (400, "too long for complete")})
    with fake_server(api) as url:
        result = CliRunner().invoke(app, ["chat", "complete", "--url", url], input="hi\n")
    assert "error: too long for complete" in result.stderr


@pytest.mark.parametrize(("is_terminal", "status"), [(False, 1), (True, 0)])
def test_a_failed_reply_gives_an_exit_code_without_a_terminal(is_terminal, status, monkeypatch, capsys):
    client, lines = FakeChatClient(InvalidRequest("too long")), iter(["one\n", "two\n", "/exit\n"])

    async def connect(*_):
        return client

    monkeypatch.setattr("shoal.cli.chat_client.ServerChatClient.open", connect)
    stdin = SimpleNamespace(isatty=lambda: is_terminal, readline=lambda: next(lines))
    monkeypatch.setattr("sys.stdin", stdin)
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    assert run(["chat", "--url", "http://127.0.0.1:8000"]) == status
    captured = capsys.readouterr()
    assert "error: too long\n" in captured.err
    assert captured.out == "reply 1\n"
    assert client.closed


@pytest.mark.parametrize(("system", "text"), [("be kind", b"\xff\nhi\n"), ("\udcff", b"hi\n")])
def test_a_message_that_is_not_utf8_is_refused(system, text, monkeypatch, capsys):
    lines = io.TextIOWrapper(io.BytesIO(text), encoding="utf-8", errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", lines)
    api = FakeApi()
    with fake_server(api) as url:
        assert run(["chat", "--url", url, "--system", system]) == 1
    out, err = capsys.readouterr()
    assert err.splitlines()[1:] == ["error: the messages are not UTF-8 text"]
    assert out == "Hello there!\n" * len(api.bodies)
    assert len(api.bodies) == text.count(b"\n") - 1, "the chat goes on"


def test_standard_input_that_cannot_be_decoded_ends_the_chat(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8"))
    with fake_server(FakeApi()) as url:
        assert run(["chat", "--url", url]) == 2
    assert "error: standard input is not UTF-8 text" in capsys.readouterr().err


def test_the_address_of_a_server_needs_no_scheme_and_its_service_must_exist(capsys):
    api = FakeApi()
    with fake_server(api) as url:
        bare = url.removeprefix("http://")
        result = CliRunner().invoke(app, ["chat", "--url", f"{bare}/v1/"], input="hi\n")
        assert (result.exit_code, result.stdout) == (0, "Hello there!\n")
        assert run(["chat", "tpyo", "--url", url]) == 2
        assert f"{url} has no service 'tpyo'; it has: chat, complete" in capsys.readouterr().err


def test_an_api_key_is_sent(monkeypatch, capsys):
    api = FakeApi(api_key="sk-1")
    with fake_server(api) as url:
        assert run(["chat", "--url", url]) == 2
        error = "wrong key (here --api-key or SHOAL_API_KEY gives it)"
        assert f"error: {url}: {error}" in " ".join(capsys.readouterr().err.split())
        result = CliRunner().invoke(app, ["chat", "--url", url, "--api-key", "sk-1"], input="hi\n")
        assert (result.exit_code, result.stdout) == (0, "Hello there!\n")
        monkeypatch.setenv("SHOAL_API_KEY", "sk-1")
        assert CliRunner().invoke(app, ["chat", "--url", url], input="hi\n").exit_code == 0


def test_of_several_api_keys_in_the_environment_the_first_is_sent(monkeypatch):
    monkeypatch.setenv("SHOAL_API_KEY", " sk-1 sk-2")
    with fake_server(FakeApi(api_key="sk-1")) as url:
        result = CliRunner().invoke(app, ["chat", "--url", url], input="hi\n")
    assert (result.exit_code, result.stdout) == (0, "Hello there!\n")


@pytest.mark.parametrize("key", ["k\u00e4", "sk-\udcff"])
def test_an_invalid_api_key_is_rejected(key, monkeypatch, capsys):
    monkeypatch.setenv("SHOAL_API_KEY", key)
    assert run(["chat", "--url", "http://127.0.0.1:8000"]) == 2
    error = "a key must be visible ASCII characters without spaces"
    assert capsys.readouterr().err == f"error: {error} (here --api-key or SHOAL_API_KEY gives it)\n"


def test_a_service_that_cannot_chat_ends_the_chat(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    api = FakeApi(reject={"complete": (400, "this model cannot chat")}, code="no_chat_template")
    with fake_server(api) as url:
        assert run(["chat", "complete", "--url", url]) == 2
    assert "error: this model cannot chat" in capsys.readouterr().err


def test_a_model_that_cannot_chat_is_refused_before_it_is_loaded(tmp_path, monkeypatch, capsys):
    tokenizer = Tokenizer(tokenizers.Tokenizer(WordLevel({"a": 0})), special_tokens={}, eos_token_ids=())
    monkeypatch.setattr("shoal.cli.chat_client.resolve_service", lambda *_: tmp_path)
    monkeypatch.setattr("shoal.cli.chat_client.Tokenizer.from_folder", lambda *_: tokenizer)
    monkeypatch.setattr("shoal.cli.chat_client.Router.start", lambda *_, **__: pytest.fail("it was loaded"))
    assert run(["chat", "smollm2"]) == 2
    assert "this model has no chat template" in capsys.readouterr().err


def test_a_missing_server_is_reported(capsys):
    assert run(["chat", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "start one with `shoal serve smollm2`" in capsys.readouterr().err


@pytest.mark.parametrize(
    "api", [FakeApi(break_off="the engine died"), FakeApi(reject={"chat": (503, "gone")})]
)
def test_a_server_that_breaks_off_ends_the_chat(api, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with fake_server(api) as url:
        assert run(["chat", "--url", url]) == 1
    assert "error: " in capsys.readouterr().err


def test_progress_text_may_look_like_markup():
    console = Console(force_terminal=True, width=120, file=io.StringIO())
    with ProgressDisplay(console) as progress:
        progress.message("loading x[/red]/tiny")
        progress._bar.refresh()
    assert "x[/red]/tiny" in console.file.getvalue()


def test_ctrl_c_at_the_prompt_says_how_to_end(monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "hi"])

    def read(prompt):
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    assert [_read_line(), _read_line()] == ["", "hi"]
    assert "Ctrl-D) ends it" in capsys.readouterr().err


def test_a_chat_needs_no_standard_output(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    monkeypatch.setattr("sys.stdout", None)
    api = FakeApi()
    with fake_server(api) as url:
        assert run(["chat", "--url", url]) == 0
    assert len(api.bodies) == 1
