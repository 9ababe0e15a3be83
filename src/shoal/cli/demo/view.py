"""The demo's streaming responses: a live table on a terminal, plain lines elsewhere."""

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.cli.demo.client import DemoRequest

_STYLES = {"waiting": "dim", "streaming": "yellow", "done": "green", "failed": "bold red"}


class BurstView:
    """Shows a burst inside a ``with`` block; ``show_end`` is the ``on_end`` callback of ``run_burst``."""

    def __init__(self, console: Console, requests: Sequence[DemoRequest]) -> None:
        self._console = console
        self._requests = requests
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(get_renderable=self.render, console=console, refresh_per_second=8)

    def __enter__(self) -> "BurstView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def show_end(self, request: DemoRequest) -> None:
        """Without a terminal, print a request that has ended; on one, the table shows it."""
        if self._live is None:
            self._console.print(plain_line(request), soft_wrap=True, highlight=False, markup=False)

    def render(self) -> Table:
        """A line for each request, with the end of its text."""
        table = Table.grid(padding=(0, 1))
        table.add_column(justify="right", style="dim")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True, overflow="crop", ratio=1)
        text_width = max(20, self._console.width - 28)
        for request in self._requests:
            shown = single_line(request.error or request.text or request.prompt.text)
            style = "dim italic" if not request.text else ""
            table.add_row(
                str(request.number),
                request.prompt.service,
                Text(request.status, style=_STYLES[request.status]),
                Text(shown[-text_width:], style=style),
            )
        return table


def single_line(text: str) -> str:
    """The text without line breaks, control characters and repeated spaces."""
    return "".join(c if c.isprintable() else " " for c in " ".join(text.split()))


def plain_line(request: DemoRequest) -> str:
    """A request that has ended, as one line of text."""
    head = f"{request.number:3d} {request.prompt.service:9s} {request.status:6s}"
    if not request.finished:
        return f"{head} {single_line(request.error)}"
    record = request.record()
    tail = single_line(request.text)[-70:]
    return f"{head} {record.e2e_s:6.2f} s {record.output_tokens:4d} tokens  ...{tail}"
