"""Style and parts of figures for papers: 8-point type, colours for the colour-blind, PNG and SVG files."""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec
from warnings import catch_warnings, filterwarnings

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from aidgn.escape import for_terminal
from aidgn.files import atomic_write
from aidgn.report.fonts import fit_fonts

# Okabe and Ito's colours for domains, warm ones for unseen domains; Tol's muted scheme and grey for classes.
TARGET_COLOURS = ("#D55E00", "#E69F00")
SOURCE_COLOURS = ("#0072B2", "#009E73", "#333333", "#CC79A7", "#56B4E9")
CLASS_COLOURS = (
    "#332288",
    "#CC6677",
    "#117733",
    "#DDCC77",
    "#88CCEE",
    "#882255",
    "#44AA99",
    "#999933",
    "#AA4499",
    "#777777",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
LEGEND_LINES = 14  # per column
WIDTH = 7.0  # inches, two columns of a paper
PAGE = 9.0  # inches, height of a page
STYLE: Any = {
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.2,
    "legend.frameon": False,
    "svg.hashsalt": "aidgn",
    "savefig.dpi": 250,
    "text.parse_math": False,  # a class may be called US$
}

P = ParamSpec("P")


def styled(function: Callable[P, Figure]) -> Callable[P, Figure]:
    """Decorate a function so that it draws with `STYLE`."""

    @wraps(function)
    def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with rc_context(STYLE):
            return function(*args, **kwargs)

    return draw


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write FOLDER/<name>.png and .svg; characters of the name that could lead to another folder become "_"."""
    name = re.sub(r"[^\w.+-]", "_", name)
    written = []
    with rc_context(STYLE), catch_warnings():
        filterwarnings("ignore", "Glyph .* missing")  # fit_fonts says it once
        fit_fonts(figure)
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            target = folder / f"{name}.{suffix}"
            with atomic_write(target) as temporary:
                figure.savefig(temporary, format=suffix, metadata=metadata)
                figure.set_layout_engine("none")  # the second file reuses the slow layout of the first
                if suffix == "svg":  # XML has no control characters, names may
                    temporary.write_text(for_terminal(temporary.read_text(encoding="utf-8")), encoding="utf-8")
            written.append(target)
    return written


def grid(
    rows: int, columns: int, width: float, height: float, widths: Sequence[float] | None = None
) -> tuple[Figure, NDArray[Any]]:
    """Create a figure with a grid of axes, without the global state of pyplot."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, width_ratios=widths)


def legend(axis: Axes, entries: Sequence[tuple[str, str, str, bool]], inside: bool = False) -> None:
    """Add a legend inside the axis or right of it, with entries (label, colour, marker, whether it has a dark edge)."""
    handles = [
        Line2D(
            [],
            [],
            linestyle="",
            marker=marker,
            color=colour,
            label=label,
            markersize=5,
            markeredgecolor="black" if edge else colour,
            markeredgewidth=0.6,
        )
        for label, colour, marker, edge in entries
    ]
    axis.legend(
        handles=handles,
        loc="center left",
        bbox_to_anchor=(0 if inside else 1.01, 0.5),
        handletextpad=0.1,
        ncols=-(-len(entries) // LEGEND_LINES),
        columnspacing=0.8,
    )


def domain_label(name: str, unseen: bool) -> str:
    return f"{shorten(name)} (unseen)" if unseen else shorten(name)


def colours_of(sources: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    many = (*SOURCE_COLOURS, *CLASS_COLOURS)
    return {
        **{name: many[i % len(many)] for i, name in enumerate(sources)},
        **{name: TARGET_COLOURS[i % len(TARGET_COLOURS)] for i, name in enumerate(targets)},
    }


def shorten(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 7]}…{name[-6:]}"
