"""``shoal chat``: a conversation in the terminal."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.sampling import MaxTokens, Seed, Temperature, TopP, given
from shoal.config import ENGINE_FLAGS
from shoal.config.nodes import Table
from shoal.core import ConfigError, InvalidRequest, QueueFull
from shoal.models import NO_CHAT_TEMPLATE

if TYPE_CHECKING:
    from shoal.cli.talk import Message, Talk

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


@with_flags(ENGINE_FLAGS)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="Model to load; with --url, a service of that server."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk with a running server.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    config: ConfigFile = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    *,
    settings: Table,
) -> None:
    """Chat in the terminal, with a model loaded here or with a running server.

    /reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer.

    **Examples:**

    `shoal chat smollm2 --system "You answer in rhymes."`

    `shoal chat --url http://127.0.0.1:8000`
    """
    if url is not None and (config is not None or settings.entries):
        raise ConfigError("--url talks with a running server; engine flags and --config have no effect there")
    sampling = given(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    start: list[Message] = [{"role": "system", "content": system}] if system else []
    with asyncio.Runner() as runner:
        if url is not None:
            from shoal.cli.talk import ServerTalk

            talk: Talk = runner.run(ServerTalk.open(url, model))
        else:
            talk = _start_engine(runner, model, config, settings)
        try:
            converse(runner, talk, start, sampling, _read_line)
        finally:
            runner.run(talk.close())


def _start_engine(runner: asyncio.Runner, model: str | None, config: ConfigFile, settings: Table) -> "Talk":
    from shoal.cli.progress import Waiting
    from shoal.cli.selection import select_service
    from shoal.cli.talk import EngineTalk

    chosen = select_service(model, file=config, settings=settings, flag="MODEL or --url")
    with Waiting() as waiting:
        return runner.run(EngineTalk.open(chosen.engine_options(), waiting.advance, waiting.say))


def converse(
    runner: asyncio.Runner,
    talk: "Talk",
    start: "list[Message]",
    sampling: Mapping[str, Any],
    read_line: Callable[[], str],
) -> None:
    """Read a line, print the answer, until the input ends; ``start`` begins every conversation."""
    typer.secho(f"talking with {talk.name}; {_HELP}", dim=True, err=True)
    messages = list(start)
    while True:
        try:
            line = read_line().strip()
        except EOFError:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            messages = list(start)
            typer.secho("forgotten", dim=True, err=True)
        elif line.startswith("/"):
            typer.secho(_HELP, dim=True, err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(runner, talk, messages, sampling)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _answer(
    runner: asyncio.Runner, talk: "Talk", messages: "list[Message]", sampling: Mapping[str, Any]
) -> str | None:
    """Print an answer as it comes; None if it was refused. Ctrl-C keeps what came so far."""
    pieces: list[str] = []

    async def stream() -> None:
        async for piece in talk.reply(messages, sampling):
            pieces.append(piece)
            typer.echo(piece, nl=False)

    try:
        runner.run(stream())
    except KeyboardInterrupt:
        typer.secho(" (stopped)", dim=True, err=True)
    except (InvalidRequest, QueueFull) as error:
        if isinstance(error, InvalidRequest) and error.code == NO_CHAT_TEMPLATE:
            raise
        typer.secho(str(error), fg="red", err=True)
        return None
    typer.echo()
    return "".join(pieces)


def _read_line() -> str:
    if sys.stdin is None:  # closed by whoever started this
        raise EOFError
    return input("> " if sys.stdin.isatty() else "")
