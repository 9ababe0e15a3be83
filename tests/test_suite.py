"""What the tests need and cannot have is skipped on a user's machine, and fails where CI is set."""

from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import settings

from at_hand import bundled_model
from hypothesis_profiles import examples
from shoal.core import ModelUnavailable


def unreachable(name: str) -> NoReturn:
    raise ModelUnavailable("the index does not answer")


def test_a_bundled_model_that_cannot_be_had_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=r"smollm2 .* the index does not answer"):
        bundled_model("smollm2", unreachable)


@pytest.mark.parametrize("value", [None, "", "false"])
def test_a_bundled_model_that_cannot_be_had_skips_elsewhere(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("CI", raising=False)
    if value is not None:
        monkeypatch.setenv("CI", value)
    with pytest.raises(pytest.skip.Exception, match="the index does not answer"):
        bundled_model("smollm2", unreachable)


def test_a_bundled_model_at_hand_is_used(tmp_path: Path) -> None:
    assert bundled_model("smollm2", lambda name: tmp_path / name) == tmp_path / "smollm2"


def test_only_exploring_tries_other_examples_each_time() -> None:
    profiles = {name: settings.get_profile(name) for name in ("quick", "more", "explore")}
    assert {name: profile.derandomize for name, profile in profiles.items()} == {
        "quick": True,
        "more": True,
        "explore": False,
    }


def test_property_tests_try_all_that_they_name_only_when_exploring() -> None:
    chosen = settings.get_current_profile_name()
    try:
        settings.load_profile("explore")
        assert [examples(150), examples(3)] == [150, 3]
        settings.load_profile("more")
        assert [examples(150), examples(3)] == [30, 3]
        settings.load_profile("quick")
        assert [examples(150), examples(10), examples(3)] == [15, 5, 3]
    finally:
        settings.load_profile(chosen)
