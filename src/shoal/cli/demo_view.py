"""Shows the demo's answers as they stream: a live table on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.demo_client import Exchange
from shoal.cli.demo_prompts import DemoPrompt

_STYLES = {"waiting": "dim", "streaming": "yellow", "done": "green", "failed": "bold red"}


class BurstView:
    """Follows a burst while the ``with`` block runs; ``changed`` is its watcher."""

    def __init__(self, console: Console, prompts: Sequence[DemoPrompt]) -> None:
        self._console = console
        self._rows = {number: Exchange(number, prompt) for number, prompt in enumerate(prompts, 1)}
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=8)

    def __enter__(self) -> "BurstView":
        """Begin to draw."""
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last picture standing."""
        if self._live:
            self._live.stop()

    def changed(self, exchange: Exchange) -> None:
        """Take note of a request; without a terminal, print it once it has ended."""
        self._rows[exchange.number] = exchange
        if self._live is None and exchange.status in ("done", "failed"):
            self._console.print(plain_line(exchange), soft_wrap=True, highlight=False, markup=False)

    def render(self) -> Table:
        """One line for each request, with the end of its text."""
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", style="dim")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="crop", ratio=1)
        room = max(20, self._console.width - 28)
        for exchange in self._rows.values():
            words = one_line(exchange.error or exchange.text or exchange.prompt.text)
            style = "dim italic" if not exchange.text else ""
            table.add_row(
                str(exchange.number),
                exchange.prompt.service,
                Text(exchange.status, style=_STYLES[exchange.status]),
                Text(words[-room:], style=style),
            )
        return table


def one_line(text: str) -> str:
    """The text without line breaks, other control characters and runs of spaces."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def plain_line(exchange: Exchange) -> str:
    """A request that has ended, as one line of a log."""
    head = f"{exchange.number:3d} {exchange.prompt.service:9s} {exchange.status:6s}"
    if not exchange.finished:
        return f"{head} {one_line(exchange.error)}"
    seconds = (exchange.end_ns - exchange.sent_ns) / 1e9
    tail = one_line(exchange.text)[-70:]
    return f"{head} {seconds:6.2f} s {exchange.output_tokens:4d} tokens  ...{tail}"
