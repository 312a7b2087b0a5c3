"""Names in scripts that matplotlib's own font lacks, with a font of two characters made here."""

import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.font_manager import fontManager
from PIL import Image

from aidgn.report import figures, fonts


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that the system says are installed, none to begin with; matplotlib knows its own font only."""
    paths: list[str] = []
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: paths)
    monkeypatch.setattr(fonts, "warned_of", set())
    own = [entry for entry in fontManager.ttflist if entry.name.startswith("DejaVu")]
    monkeypatch.setattr(fontManager, "ttflist", own)
    fonts.fonts_with.cache_clear()
    return paths


def make_font(path: Path, characters: str) -> None:
    """A font of which every character is a full square."""
    pen = TTGlyphPen(None)
    for number, point in enumerate([(0, 0), (0, 1000), (1000, 1000), (1000, 0)]):
        (pen.lineTo if number else pen.moveTo)(point)
    pen.closePath()
    square, names = pen.glyph(), [".notdef", *(f"u{ord(each):X}" for each in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(each): f"u{ord(each):X}" for each in characters})
    builder.setupGlyf(dict.fromkeys(names, square))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=1000, descent=0)
    builder.setupNameTable({"familyName": "Two Squares", "styleName": "Regular"})
    builder.setupOS2(usWeightClass=400)
    builder.setupPost()
    builder.save(path)


def draw(text: str, folder: Path, name: str) -> np.ndarray:
    """Where the picture of a text is dark; a warning of matplotlib's is an error."""
    figure, axes = figures.grid(1, 1, 2, 1)
    axes[0, 0].axis("off")
    axes[0, 0].text(0, 0, text, fontsize=40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        png, svg = figures.save(figure, folder, name)
    assert svg.stat().st_size
    return np.asarray(Image.open(png).convert("L")) < 128


def test_installed_fonts_are_used_for_what_the_usual_one_lacks(
    installed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_font(tmp_path / "squares.ttf", "病院")
    installed.append(str(tmp_path / "squares.ttf"))  # after matplotlib made its list of fonts
    installed.append(str(tmp_path / "broken.ttf"))
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    dark = draw("病院", tmp_path, "two")
    rows, columns = np.flatnonzero(dark.any(1)), np.flatnonzero(dark.any(0))
    assert dark[rows[0] + 1 : rows[-1], columns[0] + 1 : columns[-1]].all()  # two full squares, and no frames of boxes
    assert len(columns) == pytest.approx(2 * len(rows), abs=4)
    assert not caplog.records


def test_what_no_font_has_is_said_once(installed: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    draw("plain", tmp_path, "plain")
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "aidgn"):
        draw("犬 dog", tmp_path, "one")
        draw("猫 cat", tmp_path, "two")
    assert [record.getMessage()[:26] for record in caplog.records] == ["No installed font has 犬: f"]
