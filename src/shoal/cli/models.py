"""``shoal models``: list the known models, and download them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.command import Commands

if TYPE_CHECKING:
    from shoal.models import StoredImage

models = Commands(help="List the models that Shoal knows by name, and fetch them.")


@models.command("list")
def list_models() -> None:
    """Show the models known by name, which of them are cached, and the weight images in the cache.

    Any decoder-only Hugging Face folder, hub id or GGUF file can be served, too.
    """
    from shoal.models import cache_dir, list_images
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
    if images := list_images():
        console.print(_image_table(images))
    console.print(f"cache: {cache_dir()}", soft_wrap=True, highlight=False, markup=False)


def _image_table(images: "Sequence[StoredImage]") -> Table:
    """What is kept of models whose weights come and go (weights.memory)."""
    table = Table()
    table.add_column("weight image", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("of the model in", overflow="fold")
    for image in images:
        table.add_row(image.path.name, f"{image.size_bytes / 1e6:.0f} MB", _source_text(image))
    return table


def _source_text(image: "StoredImage") -> Text:
    """A path, which is no markup."""
    if image.source is None:
        return Text("unknown")
    return Text(str(image.source) if image.source.is_dir() else f"{image.source} (gone)")


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
