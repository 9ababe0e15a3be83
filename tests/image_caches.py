"""Caches in which weight images are made without a child process, which takes seconds to start."""

from pathlib import Path

import pytest


def use_image_cache(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Keep images in ``folder`` while ``patch`` lasts."""
    from shoal.execute.model import images
    from shoal.execute.model.make_image import make_image

    patch.setenv("SHOAL_CACHE", str(folder))
    patch.setattr(images, "_make_in_child", lambda order, target: make_image(*order, target))
