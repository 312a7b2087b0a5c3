"""Choose fonts for figures: names of classes and domains may be in scripts that matplotlib's font lacks."""

from contextlib import suppress
from functools import cache
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, findSystemFonts, fontManager, get_font
from matplotlib.text import Text

from aidgn.terminal import log

BOXES = "Last Resort"  # matplotlib's font that draws a box for every character
warned_of: set[str] = set()  # characters in the warning; there is one warning per process


def fit_fonts(figure: Figure) -> None:
    """Let the figure's text fall back to installed fonts for missing characters; warn if none has them."""
    texts = figure.findobj(Text)
    usual = FontProperties()
    used = {character for text in texts for character in text.get_text() if character.isprintable()}
    lacking = used - list_characters(findfont(usual))
    if not lacking:
        return
    families, missing = fonts_with(frozenset(lacking))
    for text in texts:
        text.set_fontfamily([*usual.get_family(), *families])
    if missing and not warned_of:
        warned_of.update(missing)
        log.warning(
            "No installed font has %s%s: figures show boxes in the place of such characters. Install a font "
            "that has them (for Chinese, Japanese and Korean on Debian fonts-noto-cjk), and run this again.",
            " ".join(sorted(missing)[:5]),
            " and other characters of the names" if len(missing) > 5 else "",
        )


@cache
def fonts_with(characters: frozenset[str]) -> tuple[list[str], set[str]]:
    """Choose few installed font families with the characters; also return the characters that no family has."""
    known = {Path(entry.fname) for entry in fontManager.ttflist}
    for path in findSystemFonts():  # matplotlib lists fonts at its first use; some were installed later
        if Path(path) not in known:
            with suppress(Exception):  # a font may be broken in any way
                fontManager.addfont(path)
    families: dict[str, frozenset[str]] = {}
    for entry in sorted(fontManager.ttflist, key=lambda entry: entry.name):
        if (
            entry.name not in families
            and entry.style == "normal"
            and entry.weight in range(300, 501)
            and not entry.name.startswith(BOXES)
        ):
            with suppress(Exception):
                families[entry.name] = characters & list_characters(entry.fname)
    chosen, missing = [], set(characters)
    while missing:
        best = max(families, key=lambda name: (len(families[name] & missing), "Serif" not in name), default="")
        if not best or not families[best] & missing:
            break
        chosen.append(best)
        missing -= families[best]
    return chosen, missing


def list_characters(font: str) -> set[str]:
    """Return the characters that a font file has."""
    return {chr(code) for code in get_font(font).get_charmap()}
