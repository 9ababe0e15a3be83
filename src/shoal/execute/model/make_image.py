"""The child process that makes a weight image: ``python -m shoal.execute.model.make_image ORDER``.

ORDER is a JSON object, see ``images``. An error is reported on standard output, as ``{"error": [kind,
message]}``.
"""

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from shoal.core import ModelUnsupported, ShoalError
from shoal.execute.model.images import ERRORS
from shoal.execute.model.loading import LoadedModel, load_model
from shoal.execute.model.probe import PROMPT_LENGTHS
from shoal.execute.model.record_attention import RecordingStep, packed_logits
from shoal.execute.weights.image import ImageOrigin, open_image, read_weights, write_image
from shoal.execute.weights.skeleton import take_apart


def main(arguments: list[str]) -> int:
    """Make the image that the arguments order; returns the exit status."""
    order = json.loads(arguments[0])
    torch.set_num_threads(order["threads"])
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        make_image(
            order["name"],
            Path(order["folder"]),
            getattr(torch, order["dtype"]),
            order["seed"],
            order["revision"],
            Path(order["target"]),
        )
    except ShoalError as problem:
        kind = next(name for name, kind in ERRORS.items() if isinstance(problem, kind))
        print(json.dumps({"error": [kind, str(problem)]}), flush=True)
        return 1
    except OSError as problem:
        message = f"{order['name']}: its weights cannot be stored: {problem}"
        print(json.dumps({"error": ["ModelUnavailable", message]}), flush=True)
        return 1
    return 0


def make_image(
    name: str, folder: Path, dtype: torch.dtype, seed: int | None, revision: str, target: Path
) -> None:
    """Load a model, write its image into the empty folder ``target``, and check that the image computes the
    same; raises as ``load_model`` does, and ModelUnsupported if the image does not.

    revision: of the image's origin.
    """
    model = load_model(name, folder, dtype, torch.device("cpu"), seed, onednn=False)
    architecture = type(model.module).__name__
    expected = _logits(model)
    try:
        skeleton = take_apart(model)
    except Exception as error:  # of any class of a model
        raise _immovable(name, architecture, f"{type(error).__name__}: {error}") from error
    write_image(skeleton, target, ImageOrigin(folder, revision))
    del model, skeleton
    gc.collect()
    if not torch.equal(_logits(_fetched(target, revision)), expected):
        raise _immovable(name, architecture, "its copy has other logits")


def _immovable(name: str, architecture: str, why: str) -> ModelUnsupported:
    return ModelUnsupported(
        f"{name}: {architecture} cannot be moved in and out of memory ({why:.300}); leave out weights.memory"
    )


def _fetched(folder: Path, revision: str) -> Any:
    """The model of an image, with its weights."""
    model, image = open_image(folder, revision)
    read_weights(image, check=True)
    return model


@torch.inference_mode()
def _logits(model: LoadedModel) -> torch.Tensor:
    prompts = [torch.arange(length).remainder(model.vocab_size)[None] for length in PROMPT_LENGTHS]
    return packed_logits(model.forward, prompts, RecordingStep(PROMPT_LENGTHS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
