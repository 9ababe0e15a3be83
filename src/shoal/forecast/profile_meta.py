"""``meta.yaml`` of a profile's folder: which model was measured, and on which device."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from shoal.core import ConfigError
from shoal.forecast.device_specs import DEVICE_SPECS, DeviceSpec, find_device_spec
from shoal.forecast.model_spec import ModelSpec, find_model_spec


def read_meta(folder: Path) -> Mapping[str, Any]:
    """Contents of ``meta.yaml``, {} where there is none; raises ConfigError for anything but a mapping."""
    path = folder / "meta.yaml"
    if not path.is_file():
        return {}
    try:
        meta = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{path}: expected a mapping, got {type(meta).__name__}")
    return meta


def measured_model(meta: Mapping[str, Any]) -> ModelSpec | None:
    """The model that was measured; None: none is named, or one that is not on record."""
    return find_model_spec(str(meta.get("model", "")))


def measured_device(meta: Mapping[str, Any]) -> DeviceSpec | None:
    """The device that it was measured on, by its name or by what its driver calls it; None as above."""
    found = find_device_spec(str(meta.get("hardware", "")))
    if found is not None:
        return found
    driver_name = "".join(letter for letter in str(meta.get("gpu", "")).lower() if letter.isalnum())
    named = [name for name in DEVICE_SPECS if name.replace("-", "") in driver_name]
    return DEVICE_SPECS[max(named, key=len)] if named else None
