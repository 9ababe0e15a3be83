"""``shoal chat``: a conversation in the terminal."""

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.flags import ConfigFile, with_flags
from shoal.cli.sampling import MaxTokens, Seed, Temperature, TopP, given_sampling
from shoal.config import ENGINE_FLAGS
from shoal.config.setting_tree import Table
from shoal.core import ConfigError, InvalidRequest, QueueFull
from shoal.models import NO_CHAT_TEMPLATE

if TYPE_CHECKING:
    from shoal.cli.chat_client import ChatClient, Message

_HELP = "/reset forgets the conversation, /exit (or Ctrl-D) ends it, Ctrl-C stops an answer"


@with_flags(ENGINE_FLAGS)
def chat(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Model to load; with --url, a service of that server."),
    ] = None,
    url: Annotated[str | None, typer.Option(help="Chat with a running server.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", envvar="SHOAL_API_KEY", help="With --url: an API key of that server."),
    ] = None,
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
        raise ConfigError(
            "--url connects to a running server; engine flags and --config have no effect there"
        )
    sampling = given_sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    start_messages: list[Message] = [{"role": "system", "content": system}] if system else []
    with asyncio.Runner() as runner:
        if url is not None:
            from shoal.cli.chat_client import ServerChatClient
            from shoal.cli.http_client import first_key

            client: ChatClient = runner.run(ServerChatClient.open(url, model, first_key(api_key)))
        else:
            client = _start_engine(runner, model, config, settings)
        try:
            all_accepted = converse(runner, client, start_messages, sampling, _read_line)
        finally:
            runner.run(client.close())
    if not all_accepted and not _is_interactive():
        raise typer.Exit(1)


def _start_engine(
    runner: asyncio.Runner, model: str | None, config: ConfigFile, settings: Table
) -> "ChatClient":
    from shoal.cli.chat_client import EngineChatClient
    from shoal.cli.progress import ProgressDisplay
    from shoal.cli.selection import select_service

    selected = select_service(model, file=config, settings=settings, flag="MODEL or --url")
    with ProgressDisplay() as progress:
        return runner.run(EngineChatClient.open(selected.engine_options(), progress.update, progress.message))


def converse(
    runner: asyncio.Runner,
    client: "ChatClient",
    start_messages: "list[Message]",
    sampling: Mapping[str, Any],
    read_line: Callable[[], str],
) -> bool:
    """Read lines and print replies until the input ends; ``start_messages`` begin each conversation.

    Returns whether all messages were accepted.
    """
    typer.secho(f"chatting with {client.name}; {_HELP}", dim=True, err=True)
    messages = list(start_messages)
    all_accepted = True
    while True:
        try:
            line = read_line().strip()
        except EOFError:
            return all_accepted
        if line in ("/exit", "/quit"):
            return all_accepted
        if line == "/reset":
            messages = list(start_messages)
            typer.secho("forgotten", dim=True, err=True)
        elif line.startswith("/"):
            typer.secho(_HELP, dim=True, err=True)
        elif line:
            messages.append({"role": "user", "content": line})
            reply = _print_reply(runner, client, messages, sampling)
            if reply is None:
                messages.pop()
                all_accepted = False
            else:
                messages.append({"role": "assistant", "content": reply})


def _print_reply(
    runner: asyncio.Runner, client: "ChatClient", messages: "list[Message]", sampling: Mapping[str, Any]
) -> str | None:
    """Print a reply as it arrives; None if the request was rejected. Ctrl-C keeps the text so far."""
    pieces: list[str] = []

    async def stream() -> None:
        async for piece in client.reply(messages, sampling):
            pieces.append(piece)
            typer.echo(piece, nl=False)

    try:
        runner.run(stream())
    except KeyboardInterrupt:
        typer.secho(" (stopped)", dim=True, err=True)
    except (InvalidRequest, QueueFull) as error:
        if isinstance(error, InvalidRequest) and error.code == NO_CHAT_TEMPLATE:
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        return None
    typer.echo()
    return "".join(pieces)


def _is_interactive() -> bool:
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None


def _read_line() -> str:
    """The next line; raises EOFError at the end, InvalidRequest where it is not UTF-8 text."""
    if sys.stdin is None:  # closed by the parent process
        raise EOFError
    try:
        if _is_interactive():
            return input("> ")
        line = sys.stdin.readline()  # ``input`` would also need a standard output
    except UnicodeDecodeError as error:
        raise InvalidRequest("standard input is not UTF-8 text") from error
    except KeyboardInterrupt:
        if not _is_interactive():
            raise
        typer.secho(f"\n{_HELP}", dim=True, err=True)
        return ""
    if not line:
        raise EOFError
    return line
