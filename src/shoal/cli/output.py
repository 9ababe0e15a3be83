"""Result files of commands: checks before a run, writing; ``-`` is standard output."""

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from shoal.core import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

STANDARD_OUTPUT = Path("-")
"""A result's path that means standard output. Other output then goes to standard error."""
PICTURES = (".png", ".svg", ".pdf")
"""File name suffixes of pictures."""


def check_outputs(*files: Path | None, picture: Path | None = None, folder: Path | None = None) -> None:
    """Raise ConfigError for a path that cannot be written, before a long run whose results would be lost.

    folder: may not exist yet; it is created later.
    """
    if STANDARD_OUTPUT in (picture, folder):
        raise ConfigError("pictures and folders cannot go to standard output (-); give it a name")
    if picture is not None and picture.suffix.lower() not in PICTURES:
        raise ConfigError(f"cannot draw {picture}: a picture's name ends with {', '.join(PICTURES)}")
    if folder is not None:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise ConfigError(f"cannot write into {folder}: {existing} is a file")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write into {folder}: no permission to write in {existing}")
    paths = [file for file in (*files, picture) if file is not None]
    if paths.count(STANDARD_OUTPUT) > 1:
        raise ConfigError("only one result can go to standard output (-); name a file for the others")
    for at, file in enumerate(paths):
        if file in paths[:at] and file != STANDARD_OUTPUT:
            raise ConfigError(f"two results cannot go to {file}; name a file for each")
        if not file.parent.is_dir():
            raise ConfigError(f"cannot write {file}: there is no folder {file.parent}")
        if file.is_dir():
            raise ConfigError(f"cannot write {file}: it is a folder")


@contextmanager
def output_file(path: Path) -> Iterator[Path]:
    """The file to write: ``path``, or for ``-`` a temporary file that is then copied to standard output.

    Raises ConfigError if it cannot be written.
    """
    if path != STANDARD_OUTPUT:
        try:
            yield path
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
        return
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        file = Path(folder) / "output"
        yield file
        try:
            typer.echo(file.read_text(encoding="utf-8"), nl=False)
            sys.stdout.flush()
        except (OSError, AttributeError) as error:  # full, or closed
            raise ConfigError(f"cannot write to standard output: {error}") from error


def json_text(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2) + "\n"


def write_texts(results: Sequence[tuple[Path | None, str]]) -> list[Path]:
    """Write the results that have a path; returns the paths. Raises ConfigError where one cannot be written.

    Call it before tables are printed: a reader such as ``| head`` may close standard output.
    """
    written = []
    for path, content in results:
        if path is not None:
            with output_file(path) as file:
                file.write_text(content, encoding="utf-8")
            written.append(path)
    return written


def print_written(console: "Console", paths: Iterable[Path]) -> None:
    for path in paths:
        if path != STANDARD_OUTPUT:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
