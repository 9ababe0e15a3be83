"""``shoal models``: list the known models, and download them."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shoal.cli.command import Commands

models = Commands(help="List the models that Shoal knows by name, and fetch them.")


@models.command("list")
def list_models() -> None:
    """Show the models known by name, and which of them are cached.

    Any decoder-only Hugging Face folder, hub id or GGUF file can be served, too.
    """
    from shoal.models import cache_dir
    from shoal.models import list_models as all_models

    table = Table()
    for heading in ("name", "cached", "size", "chat", "licence", "description"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for model in all_models():
        size = f"{model.size_bytes / 1e6:.0f} MB" if model.size_bytes else "-"
        table.add_row(
            model.name,
            "yes" if model.cached else "no",
            size,
            "yes" if model.chat else "no",
            model.licence,
            model.description,
        )
    console = Console()
    console.print(table)
    console.print(f"cache: {cache_dir()}", soft_wrap=True, highlight=False, markup=False)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model's name, as in `shoal models list`.")],
) -> None:
    """Fetch and convert a model, so that `shoal serve` starts at once and without a network.

    **Example:** `shoal models pull smollm2`
    """
    from shoal.cli.progress import ProgressDisplay
    from shoal.models import pull_model

    with ProgressDisplay() as progress:
        folder = pull_model(name, progress.update)
    typer.echo(f"{name} is at {folder}")
