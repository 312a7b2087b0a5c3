"""The critical-difference figure: average ranks of algorithms, with bars over those too close to tell apart."""

import io
import re

from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from aidgn.analysis.comparison import Comparison
from aidgn.analysis.ranks import Ranks
from aidgn.report.figures import PAGE, STYLE, WIDTH, grid, shorten, styled

LINE = 0.17  # inches between two names
BAR = 0.09  # inches between two bars
NAMES = 1.4  # inches at either side for names
COLOUR = "#0072B2"


@styled
def critical_difference(ranks: Ranks, title: str) -> Figure:
    """Draw average ranks on an axis, the best on the left (Demšar 2006).

    A bar joins algorithms whose ranks differ by no more than the critical difference, whose length is shown above.
    """
    names = list(ranks.averages)
    k, groups = len(names), ranks.groups()
    left = (k + 1) // 2  # algorithms with their name on the left
    bars = BAR * (len(groups) + 1)
    below = bars + LINE * (left + 0.5)
    above = 0.7
    height = min(above + below, PAGE)
    width = min(WIDTH, 2 * NAMES + max(2.0, 0.5 * (k - 1)))
    figure, axes = grid(1, 1, width, height)
    axis = axes[0, 0]
    figure.set_layout_engine("none")
    axis.set_position((NAMES / width, 0, 1 - 2 * NAMES / width, 1))
    axis.set_axis_off()
    axis.set_xlim(1, k)
    axis.set_ylim(-below, above)  # inches around the axis of ranks, which is at 0

    line = {"color": "black", "linewidth": 0.8, "clip_on": False}
    axis.plot([1, k], [0, 0], **line)
    for number in range(1, k + 1):
        axis.plot([number, number], [0, 0.06], **line)
        axis.text(number, 0.08, str(number), ha="center", va="bottom", fontsize=7)
    end = min(1 + ranks.critical_difference, k)
    longer = 1 + ranks.critical_difference > k
    axis.plot([1, end], [0.3, 0.3], color=COLOUR, linewidth=1.5, clip_on=False)
    for place in (1,) if longer else (1, end):
        axis.plot([place, place], [0.26, 0.34], color=COLOUR, linewidth=1.0, clip_on=False)
    label = f"critical difference {ranks.critical_difference:.2f}" + (", longer than the axis" if longer else "")
    axis.text(1, 0.36, label, ha="left", va="bottom", fontsize=7, color=COLOUR)
    axis.text(1, 0.52, title, ha="left", va="bottom", fontsize=8)

    for number, group in enumerate(groups, 1):
        ends = ranks.averages[group[0]], ranks.averages[group[-1]]
        axis.plot([ends[0] - 0.03, ends[1] + 0.03], [-BAR * number] * 2, color="black", linewidth=2.5, clip_on=False)
    margin = 0.06 * (k - 1)
    for number, name in enumerate(names):
        on_left = number < left
        row = number if on_left else k - 1 - number
        y = -bars - LINE * (row + 0.5)
        edge = 1 - margin if on_left else k + margin
        rank = ranks.averages[name]
        axis.plot([rank, rank, edge], [0, y, y], color="#777777", linewidth=0.6, clip_on=False)
        text = f"{shorten(name)}  {rank:.2f}" if on_left else f"{rank:.2f}  {shorten(name)}"
        axis.text(edge, y, f" {text} ", ha="right" if on_left else "left", va="center", fontsize=7)
    return figure


def draw_ranks(comparison: Comparison) -> Figure | None:
    """Draw the figure of a comparison, None if it has no ranks."""
    if comparison.ranks is None:
        return None
    title = f"Average ranks, {comparison.dataset or 'all data sets'}, {comparison.ranks.blocks} pairs"
    title += "" if comparison.ranks.same_budget else ", unequal budgets"
    return critical_difference(comparison.ranks, title)


def to_svg(figure: Figure, prefix: str) -> Markup:
    """Return a figure as an SVG element for a page, whose black takes the colour of the page's text.

    Args:
        figure: The figure.
        prefix: Beginning of the element's ids, which must be unique in a page.
    """
    output = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    text = output.getvalue()
    text = text[text.index("<svg") :].replace("#000000", "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", text, flags=re.DOTALL)
    return Markup(re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", text))  # names are drawn as paths
