"""MkDocs hooks: fill pages from the code (commands, algorithms, signatures, dependencies); equations as MathML."""

import html
import inspect
import pkgutil
import re
import tomllib
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]

REASONS = {
    "torch": "tensors, automatic differentiation, compilation",
    "torchvision": "second source of backbones; the reference for augmentation",
    "timm": "backbones and their pretrained weights",
    "safetensors": "weights on disk without pickle",
    "huggingface-hub": "models on the Hugging Face Hub; timm needs it too",
    "numpy": "arrays outside the network: images, splits, records",
    "scipy": "Bessel functions and statistical tests",
    "scikit-learn": "the embedded digits; t-SNE",
    "pillow": "decoding images",
    "click": "the command line",
    "rich": "progress and tables in the terminal",
    "pyyaml": "sweep plans",
    "matplotlib": "figures for papers (PNG, SVG)",
    "jinja2": "the report page",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace {{ commands }}, {{ algorithms }}, {{ dependencies }} and {{ api module.name }}."""
    for name, make in {"commands": commands, "algorithms": algorithms, "dependencies": dependencies}.items():
        placeholder = f"{{{{ {name} }}}}"
        if placeholder in markdown:
            markdown = markdown.replace(placeholder, make())
    return re.sub(r"\{\{ api ([\w.]+) \}\}", lambda match: signature_and_docstring(match[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    r"""Turn \( ... \) and \[ ... \] into MathML, which browsers show without a script."""

    def formula(match: re.Match[str]) -> str:
        latex = html.unescape(match[2].strip()[2:-2])
        if match[1] == "span":
            return convert(latex)
        return f'<div class="formula">{convert(latex, display="block")}</div>'

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, content, flags=re.DOTALL)


def commands() -> str:
    """Describe every command in the order of `aidgn --help`."""
    from aidgn.cli import COMMANDS, load_command

    return "\n\n".join(describe_command(load_command(name), f"aidgn {name}") for name in COMMANDS)


def describe_command(command: click.Command, name: str) -> str:
    """Give the help, usage, options and examples of one command as Markdown."""
    if isinstance(command, click.Group):
        parts = [describe_command(child, f"{name} {child_name}") for child_name, child in command.commands.items()]
        return "\n\n".join([f"## `{name}`", paragraph(command.help), *parts])
    context = click.Context(command, info_name=name)
    heading = "###" if name.count(" ") > 1 else "##"
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"{heading} `{name}`", paragraph(command.help), f"```text\n{usage}\n```"]
    helps = [parameter.get_help_record(context) for parameter in command.params]
    rows = [[f"`{option}`", text] for option, text in filter(None, helps) if text]
    if rows:
        parts.append(table(["option", ""], rows))
    if command.epilog:
        parts.append("```text\n" + inspect.cleandoc(command.epilog.replace("\b", "")).strip() + "\n```")
    return "\n\n".join(parts)


def algorithms() -> str:
    """Describe each algorithm: objective, paper, search space."""
    from aidgn.algorithms import ALGORITHMS

    parts = []
    for name, algorithm in ALGORITHMS.items():
        rows = [
            [f"`{key}`", f"{default:g}" if isinstance(default, float) else str(default), distribution.text]
            for key, (default, distribution) in algorithm.search_space.items()
        ]
        parts += [
            f"## {name}",
            f"{algorithm.title[0].upper()}{algorithm.title[1:]}. {algorithm.paper}.",
            f"```text\n{inspect.getdoc(algorithm)}\n```",
            table(["hyper-parameter", "default (224 pixels)", "search distribution"], rows),
        ]
    return "\n\n".join(parts)


def signature_and_docstring(name: str) -> str:
    """Give the signature and docstring of a function or class, named as `module.name`."""
    documented = pkgutil.resolve_name(name)
    signature = re.sub(r"(?<=[:>] )'([\w.\[\], |]+)'", r"\1", str(inspect.signature(documented)))
    signature = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", signature).replace("(self, ", "(")
    if len(signature) > 80:
        signature = re.sub(r", (?=\*{0,2}\w+: |\*, )", ",\n    ", signature)
    call = f"```python\n{name.rpartition('.')[2]}{signature}\n```"
    return f"### `{name}`\n\n{call}\n\n{docstring_to_markdown(inspect.getdoc(documented) or '')}"


def docstring_to_markdown(docstring: str) -> str:
    """Format the sections of a Google-style docstring; keep the text before them as it is."""
    text, *sections = re.split(r"^(Args|Returns|Raises|Examples?):\n", docstring, flags=re.MULTILINE)
    parts = [f"```text\n{text.strip()}\n```"]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        body = inspect.cleandoc(body)
        if title == "Args":
            entries = re.split(r"^(\*{0,2}\w+): ", body, flags=re.MULTILINE)[1:]
            rows = [[f"`{name}`", escape(text)] for name, text in zip(entries[::2], entries[1::2], strict=True)]
            parts.append(table(["argument", ""], rows))
        elif title.startswith("Example"):
            parts.append(f"```pycon\n{body}\n```")
        else:
            parts.append(f"{title}: {escape(body)}")
    return "\n\n".join(parts)


def dependencies() -> str:
    """List the core dependencies with their reasons, then the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = [[f"`{package}`", REASONS[re.split(r"[<>=!~ \[]", package)[0]]] for package in project["dependencies"]]
    extras = [
        [f"`aidgn[{extra}]`", ", ".join(f"`{package}`" for package in packages)]
        for extra, packages in project["optional-dependencies"].items()
    ]
    return table(["package", "why"], core) + "\n\n" + table(["extra", "brings"], extras)


def table(head: list[str], rows: list[list[str]]) -> str:
    """Format a Markdown table."""
    cells = [
        [cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [head, ["---"] * len(head), *rows]
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def paragraph(text: str | None) -> str:
    """Give help text as Markdown."""
    paragraphs = inspect.cleandoc(text or "").replace("\b\n", "").split("\n\n")
    return "\n\n".join(map(escape, paragraphs))


def escape(text: str) -> str:
    """Join lines, and keep <domain> from being an HTML tag outside of code."""
    parts = " ".join(text.split()).split("`")
    return "`".join(part if position % 2 else part.replace("<", "&lt;") for position, part in enumerate(parts))
