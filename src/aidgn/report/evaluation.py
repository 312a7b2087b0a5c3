"""Write the page of `aidgn evaluate`: one HTML file that needs no network and no other file."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import aidgn
from aidgn.escape import open_templates
from aidgn.evaluation import Evaluation
from aidgn.files import write_text
from aidgn.new_site.interval import percent
from aidgn.report.overview import shade_rows

SIDE = 300  # side of the reliability diagram in pixels


def write_evaluation(results: Sequence[Evaluation], path: Path) -> Path:
    """Write the page of one or several models on the same pictures."""
    templates = open_templates(Path(__file__).parent)
    templates.filters["percent"] = lambda share: "–" if share is None else f"{share:.1%}"
    templates.filters["whole"] = percent
    text = templates.get_template("evaluation.html.j2").render(
        results=results,
        side=SIDE,
        shades=[shade_rows(result.confusion) for result in results],
        version=aidgn.__version__,
        today=date.today().isoformat(),
    )
    write_text(path, text)
    return path
