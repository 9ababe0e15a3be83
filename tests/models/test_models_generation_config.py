from pathlib import Path

import pytest
from models_builders import make_folder

from shoal.core import ModelUnavailable
from shoal.models import advised_sampling, read_sampling_defaults
from shoal.models.download.catalog import BUNDLED


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_p": 0.9,
                "top_k": 20,
                "max_length": 9,
                "eos_token_id": 2,
            },
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20},
        ),
        ({"temperature": None, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        (
            {"do_sample": False, "top_p": 0.5, "repetition_penalty": 2},
            {"temperature": 0, "repetition_penalty": 2},
        ),
    ],
)
def test_recommended_sampling_is_read(tmp_path: Path, config: object, expected: dict[str, float]) -> None:
    assert read_sampling_defaults(make_folder(tmp_path, None, generation_config=config)) == expected


def test_a_model_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == {}


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"temperature": -1}, {"temperature": True}])
def test_values_without_meaning_are_named(tmp_path: Path, config: object) -> None:
    with pytest.raises(ModelUnavailable, match=r"generation_config\.json: temperature must"):
        read_sampling_defaults(make_folder(tmp_path, None, generation_config=config))


def test_the_catalog_has_defaults_for_bundled_models(tmp_path: Path) -> None:
    assert advised_sampling("smollm2", tmp_path) == BUNDLED["smollm2"].sampling != {}
    assert advised_sampling("other", tmp_path) == {}
    folder = make_folder(tmp_path / "own", None, generation_config={"temperature": 0.6})
    assert advised_sampling("smollm2", folder) == {"temperature": 0.6}


def test_a_number_beyond_all_floats_is_no_temperature(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, None, generation_config={"temperature": 10**400})
    with pytest.raises(ModelUnavailable, match="generation_config"):
        read_sampling_defaults(folder)
