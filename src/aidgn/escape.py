"""Escape names of classes, folders or files, which anyone may have chosen, wherever they are shown.

One function per medium. On the terminal it is applied where text leaves the program: `aidgn.terminal` wraps standard
output and standard error, and `aidgn.progress.Output` is rich's console.
"""

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

MARKDOWN = frozenset("\\`*_{}[]<>#|!")
LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",  # <, > and | are other characters in TeX's first encoding
    **{character: "\\" + character for character in "&%$#_{}"},
}
CONTROL = [*range(9), *range(11, 32), *range(127, 160)]  # all but tab and line feed
# Characters that reverse the direction of the text around them, so that a name can pass for another.
BIDIRECTIONAL = [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]
VISIBLE = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in (*CONTROL, *BIDIRECTIONAL)}
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # the wide ones in East Asian spreadsheets


def for_terminal(text: str) -> str:
    """Show control characters as codes, so that a name cannot move the cursor or hide what follows it.

    >>> for_terminal("cat\\x1b[2J")
    'cat\\\\x1b[2J'
    """
    return text.translate(VISIBLE)


def for_markdown(text: str) -> str:
    """Escape what Markdown would read as formatting or HTML, on one line.

    >>> for_markdown("<b>a_b")
    '\\\\<b\\\\>a\\\\_b'
    """
    return "".join(f"\\{character}" if character in MARKDOWN else character for character in _one_line(text))


def for_markdown_code(text: str) -> str:
    """Return text as code in Markdown, without the backticks and line breaks that would end the code."""
    text = _one_line(text).replace("`", "'")
    return f"`{text}`"


def for_html(text: str) -> str:
    """Escape text for an HTML element or a quoted attribute."""
    return html.escape(for_terminal(text))


def open_templates(folder: Path, markdown: bool = False) -> "Environment":
    """Open the templates of a folder, which escape all values but `Markup`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def escape_markdown(value: Any) -> str:
        return value if isinstance(value, Markup) else for_markdown(str(value))

    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        autoescape=not markdown,
        finalize=escape_markdown if markdown else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def for_latex(text: str) -> str:
    """Escape what LaTeX would read as a command, on one line, as an empty line would end a caption."""
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def for_csv(value: Any) -> Any:
    """Put an apostrophe before text that a spreadsheet would run as a formula; return other values unchanged.

    >>> for_csv("=HYPERLINK(...)"), for_csv(-1.5)
    ("'=HYPERLINK(...)", -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _one_line(text: str) -> str:
    return for_terminal(" ".join(text.split()))
