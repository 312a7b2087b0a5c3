"""Hostile names in every medium, as its own parser reads them."""

import html
from html.parser import HTMLParser

import pytest

from aidgn.escape import for_csv, for_html, for_latex, for_markdown, for_terminal

HOSTILE = "</td><script>alert(1)</script>\x1b[2J|*bold*\n\n# head\u202etxt.exe"


def test_terminal_shows_control_characters_as_codes() -> None:
    assert for_terminal("a\x1b]0;title\x07\x9b\x7fb\tc") == "a\\x1b]0;title\\x07\\x9b\\x7fb\tc"
    assert for_terminal("\u202egnp.exe") == "\\u202egnp.exe"
    assert for_terminal("Zürich 東京 ± é") == "Zürich 東京 ± é"


def test_html_opens_no_element() -> None:
    class Tags(HTMLParser):
        seen: tuple[str, ...] = ()
        text = ""

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.seen += (tag,)

        def handle_data(self, data: str) -> None:
            self.text += data

    parser = Tags()
    parser.feed(f"<td>{for_html(HOSTILE)}</td>")
    assert parser.seen == ("td",)
    assert parser.text == for_terminal(HOSTILE)
    assert html.unescape(for_html('"quoted"')) == '"quoted"' and '"' not in for_html('"')


def test_markdown_and_latex_stay_on_one_line() -> None:
    for escape in (for_markdown, for_latex):
        assert "\n" not in escape(HOSTILE) and "\x1b" not in escape(HOSTILE)
    assert for_markdown("a|b_<c>#") == r"a\|b\_\<c\>\#"
    assert for_latex("50%_{x}\\") == r"50\%\_\{x\}\textbackslash{}"


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_csv_starts_no_formula(text: str) -> None:
    assert for_csv(text) == "'" + text


@pytest.mark.parametrize("value", ["plain", "a=b", -1.5, 3, None, ""])
def test_csv_leaves_other_values(value: object) -> None:
    assert for_csv(value) is value
