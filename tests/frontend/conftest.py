import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))


@pytest.fixture
def fake_models(monkeypatch):
    """Every Shoal has a fake engine and a tokenizer of bytes."""
    from engine_builders import ByteTokenizer, build_fake

    from shoal.frontend import offline_api

    monkeypatch.setattr(offline_api, "build_engine", build_fake)
    monkeypatch.setattr(offline_api, "resolve_service", lambda service, progress=None: Path(service.model))
    monkeypatch.setattr(offline_api.Tokenizer, "from_folder", lambda *_: ByteTokenizer())
