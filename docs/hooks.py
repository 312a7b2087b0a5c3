"""What the documentation takes from the code when it is built: commands, algorithms, signatures, dependencies; and
equations as MathML, which browsers show without any script."""

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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace {{ commands }}, {{ algorithms }}, {{ dependencies }} and {{ api module.name }}."""
    makers = {"commands": commands, "algorithms": algorithms, "dependencies": dependencies}
    for name, make in makers.items():
        if f"{{{{ {name} }}}}" in markdown:
            markdown = markdown.replace(f"{{{{ {name} }}}}", make())
    return re.sub(r"\{\{ api ([\w.]+) \}\}", lambda found: api(found[1]), markdown)


def on_page_content(content: str, **_: Any) -> str:
    r"""Turn \( ... \) and \[ ... \] into MathML."""

    def formula(found: re.Match[str]) -> str:
        text = html.unescape(found[2].strip()[2:-2])
        if found[1] == "span":
            return convert(text)
        return f'<div class="formula">{convert(text, display="block")}</div>'

    return re.sub(r'<(div|span) class="arithmatex">(.*?)</\1>', formula, content, flags=re.DOTALL)


def commands() -> str:
    """Every command with its arguments, options and examples, in the order of `aidgn --help`."""
    from aidgn.cli import app

    return "\n\n".join(described(command, f"aidgn {name}") for name, command in app.commands.items())


def described(command: click.Command, name: str) -> str:
    if isinstance(command, click.Group):
        parts = [described(each, f"{name} {below}") for below, each in command.commands.items()]
        return "\n\n".join([f"## `{name}`", prose(command.help), *parts])
    context = click.Context(command, info_name=name)
    level = "###" if name.count(" ") > 1 else "##"
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"{level} `{name}`", prose(command.help), f"```text\n{usage}\n```"]
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record:
            rows.append("| " + " | ".join(cell(text) for text in (f"`{record[0]}`", record[1])) + " |")
    if rows:
        parts.append("\n".join(["| option | |", "|---|---|", *rows]))
    if command.epilog:
        parts.append("```text\n" + inspect.cleandoc(command.epilog.replace("\b", "")).strip() + "\n```")
    return "\n\n".join(parts)


def prose(text: str | None) -> str:
    """Help as a paragraph of Markdown, in which <domain> is no tag."""
    return inspect.cleandoc(text or "").replace("\b\n", "").replace("<", "&lt;")


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def algorithms() -> str:
    """Each algorithm with its objective, paper and search space."""
    from aidgn.algorithms import ALGORITHMS

    parts = []
    for name, kind in ALGORITHMS.items():
        rows = [
            f"| `{key}` | {cell(f'{default:g}' if isinstance(default, float) else str(default))} | "
            f"{cell(str(distribution))} |"
            for key, (default, distribution) in kind.search_space.items()
        ]
        parts += [
            f"## {name}",
            f"{kind.title[0].upper()}{kind.title[1:]}. {kind.paper}.",
            f"```text\n{inspect.getdoc(kind)}\n```",
            "\n".join(["| hyper-parameter | default (224 pixels) | searched |", "|---|---|---|", *rows]),
        ]
    return "\n\n".join(parts)


def api(name: str) -> str:
    """The signature and docstring of one function or class."""
    thing, attribute = pkgutil.resolve_name(name), name.rpartition(".")[2]
    signature = re.sub(r"(?<=[:>] )'([\w.\[\], |]+)'", r"\1", str(inspect.signature(thing)))
    signature = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", signature).replace("(self, ", "(")
    if len(signature) > 80:
        signature = re.sub(r", (?=\*{0,2}\w+: |\*, )", ",\n    ", signature)
    return f"### `{name}`\n\n```python\n{attribute}{signature}\n```\n\n```text\n{inspect.getdoc(thing)}\n```"


WHY = {  # of every package that an installation brings
    "torch": "tensors, automatic differentiation, compilation",
    "torchvision": "second source of backbones; its transforms are what augmentation equals",
    "timm": "backbones and their pretrained weights",
    "safetensors": "weights on disk without pickle",
    "numpy": "arrays outside the network: images, splits, records",
    "scipy": "Bessel functions and tests of the theory and the diagnosis",
    "scikit-learn": "the embedded digits; t-SNE",
    "pillow": "decoding images",
    "click": "the command line; starts three times faster than typer, which is built on it",
    "rich": "progress, tables in the terminal",
    "pyyaml": "sweep plans; timm's hub client brings it anyway",
    "matplotlib": "figures for papers (PNG, SVG)",
    "jinja2": "the report page; torch brings it anyway",
}


def dependencies() -> str:
    """The core dependencies with their reason, then the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    core = [(re.split(r"[<>=!~ \[]", each)[0], each) for each in project["dependencies"]]
    rows = [f"| `{wanted}` | {WHY[name]} |" for name, wanted in core]
    extras = [
        f"| `aidgn[{extra}]` | {', '.join(f'`{each}`' for each in wanted)} |"
        for extra, wanted in project["optional-dependencies"].items()
    ]
    return "\n".join(["| package | why |", "|---|---|", *rows, "", "| extra | brings |", "|---|---|", *extras])
