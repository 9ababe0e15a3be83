"""Plots are written; missing libraries and unwritable files are reported."""

import importlib.util
import struct

import pytest

from shoal.core import ConfigError
from shoal.measure import Panel, Series, require_plots, save_plot

PANEL = Panel(
    title="a panel",
    x_label="measured",
    y_label="predicted",
    series=[Series("dots", [1, 20, 300], [2, 15, 310]), Series("", [1, 300], [1, 300], line=True, colour=1)],
    log=True,
    diagonal=True,
)
EMPTY = Panel(title="nothing", x_label="x", y_label="y", series=[], diagonal=True)


def png_size(path):
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", data[16:24])


def test_a_picture_grows_with_its_panels(tmp_path):
    single, many = tmp_path / "one.png", tmp_path / "many.png"
    save_plot(single, [[PANEL]], "a title")
    save_plot(many, [[PANEL, EMPTY], [PANEL]])
    width, height = png_size(single)
    assert png_size(many) == (2 * width, 2 * height)


def test_an_svg_has_the_words_and_the_points(tmp_path):
    path = tmp_path / "one.svg"
    save_plot(path, [[PANEL]], "a title")
    written = path.read_text()
    for words in ("a title", "a panel", "measured", "predicted", "dots"):
        assert f"<!-- {words} -->" in written


@pytest.mark.parametrize("name", ["picture.wrong", "missing/picture.png"])
def test_an_unwritable_picture_is_reported(name, tmp_path):
    with pytest.raises(ConfigError, match="cannot write the picture"):
        save_plot(tmp_path / name, [[PANEL]])


def test_missing_matplotlib_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[plots\]'"):
        require_plots()
    with pytest.raises(ConfigError, match="matplotlib"):
        save_plot(tmp_path / "one.png", [[PANEL]])
    assert not (tmp_path / "one.png").exists()
