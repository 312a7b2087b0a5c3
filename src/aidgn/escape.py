"""Make names that anyone may have chosen, of classes, folders or files, harmless where they are shown."""

import html

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
# Characters that reverse the direction of the text around them, so that a name can pass for another.
BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def for_terminal(text: str) -> str:
    """Show control characters as codes, so that a name cannot move the cursor or hide what follows it.

    >>> for_terminal("cat\\x1b[2J")
    'cat\\\\x1b[2J'
    """
    return "".join(_visible(character) for character in text)


def for_markdown(text: str) -> str:
    """Escape what Markdown would read as formatting or HTML, on one line.

    >>> for_markdown("<b>a_b")
    '\\\\<b\\\\>a\\\\_b'
    """
    return "".join(f"\\{character}" if character in MARKDOWN else character for character in _one_line(text))


def for_html(text: str) -> str:
    """Escape text for an HTML element or a quoted attribute."""
    return html.escape(for_terminal(text))


def for_latex(text: str) -> str:
    """Escape what LaTeX would read as a command, on one line, as an empty line would end a caption."""
    return "".join(LATEX.get(character, character) for character in _one_line(text))


def for_csv(value: object) -> object:
    """Put an apostrophe before text that a spreadsheet would run as a formula; leave numbers as they are.

    >>> for_csv("=HYPERLINK(...)"), for_csv(-1.5)
    ("'=HYPERLINK(...)", -1.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _one_line(text: str) -> str:
    return for_terminal(" ".join(text.split()))


def _visible(character: str) -> str:
    control = (character < " " and character not in "\t\n") or "\x7f" <= character < "\xa0"
    if not control and character not in BIDIRECTIONAL:
        return character
    return f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
