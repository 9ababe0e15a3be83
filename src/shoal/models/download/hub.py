"""Downloading models from a Hugging Face hub, with huggingface_hub and its cache and settings."""

import io
from pathlib import Path
from typing import Any

from shoal.core import ModelUnavailable
from shoal.models.download.disk_full import disk_full, is_disk_full
from shoal.models.progress import Progress

_WEIGHTS = "*.safetensors"
_WANTED = ["*.json", _WEIGHTS, "*.model", "*.tiktoken", "*.txt", "*.jinja"]
# Subfolders have other formats and training leftovers. Patterns that exclude all but
# additional_chat_templates.
_UNWANTED = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*"]


def snapshot(hub_id: str, progress: Progress, hint: str, *, weights: bool = True) -> Path:
    """Folder with the files of ``hub_id`` that serving needs, downloaded on first use.

    weights: whether to download weights. Without a network, a complete earlier download is used. Raises
    ModelUnavailable, ending in ``hint``, if there is none or the hub does not have or give the model.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = huggingface_hub.snapshot_download(
            hub_id,
            allow_patterns=[name for name in _WANTED if weights or name != _WEIGHTS],
            ignore_patterns=_UNWANTED,
            tqdm_class=_reporting_bar(f"downloading {hub_id}", progress),
        )
    except GatedRepoError:
        problem = "the hub asks you to accept its terms first; do so there and set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "the hub has no such model, or it is private (then set HF_TOKEN)"
    except Exception as error:  # connection, offline mode, malformed id
        if is_disk_full(error):
            store = Path(huggingface_hub.constants.HF_HUB_CACHE)
            raise disk_full(f"cannot store {hub_id!r}", store, "set HF_HOME to a folder elsewhere") from error
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = (
            f"the hub cannot be reached and no complete earlier download is in its cache ({first_line})"
            "; download it where there is a network and name its folder instead, or set HF_ENDPOINT to a"
            " mirror"
        )
    else:
        return Path(folder)
    raise ModelUnavailable(f"cannot get {hub_id!r}: {problem}. {hint}")


def _reporting_bar(what: str, progress: Progress) -> Any:
    """A tqdm class that reports bytes to ``progress`` and draws nothing."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    class ReportingBar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "leave": False})

        def display(self, *_args: Any, **_kwargs: Any) -> None:
            if self.unit == "B" and self.total:
                progress(what, int(self.n), int(self.total))

    return ReportingBar
