import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "build_backend"))

from native_builders import build_info, in_tree, make_tree


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree whose library was built into its sources; skips the test where it cannot be."""
    tree = make_tree(tmp_path_factory.mktemp("tree"))
    in_tree(tree, "from compile import *; build_library(TARGET)")
    reason = build_info(tree / "src/shoal/native").get("reason")
    if reason:
        pytest.skip(reason)
    return tree
