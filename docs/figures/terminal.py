"""Draw `terminal.svg`: a short session of real commands, trained while the script runs (a few minutes).

python docs/figures/terminal.py
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

from aidgn.data import load_dataset

WIDTH = 90
SESSION = [
    "aidgn sweep digits --algorithm ERM --algorithm AIDGN --trials 2 --yes",
    "aidgn fit photos --quick",
]


def write_photos(folder: Path) -> None:
    """Write three classes of the embedded digits as a folder of pictures."""
    digits = load_dataset("digits")
    assert digits.pixels is not None
    for file, pixels, label in zip(digits.files, digits.pixels, digits.labels, strict=True):
        if label < 3:
            path = folder / file
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)


def run(command: str, folder: Path) -> str:
    """Run a command as on a terminal with colours; return its standard output."""
    environment = {**os.environ, "COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    words = [sys.executable, "-m", *command.split()]
    result = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return result.stdout.rstrip()


def draw(session: list[tuple[str, str]]) -> str:
    """Draw commands and outputs as an SVG that needs no font from elsewhere."""
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for command, output in session:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi(output))
        console.print()
    svg = console.export_svg(title="aidgn", unique_id="terminal")
    svg = re.sub(r"\s*(@font-face \{.*?\}|<!--.*?-->)", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photos(folder / "photos")
        outputs = [(command, run(command, folder)) for command in SESSION]
    Path(__file__).with_suffix(".svg").write_text(draw(outputs), encoding="utf-8")
