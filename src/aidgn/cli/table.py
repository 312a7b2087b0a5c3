"""aidgn table"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aidgn.errors import AidgnError
from aidgn.terminal import direct

if TYPE_CHECKING:
    from aidgn.report.table_formats import Table
    from aidgn.runs.records import Records


@click.command(
    epilog="""\b
Examples:
  aidgn table runs/
  aidgn table runs/ --paper --selection oracle
  aidgn table runs/ --adaptation --paper
  aidgn table runs/ --metric macro_f1
  aidgn table runs/ --compare --algorithm ERM --algorithm AIDGN
  aidgn table runs/ --compare --json comparison.json --figures figures/
  aidgn table runs/ --tidy metrics.csv
  aidgn table sweep1/ sweep2/ --latex > table.tex
The command also reads folders that DomainBed wrote.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--selection",
    default="training",
    metavar="training|leave-one-out|oracle",
    help="Method that selects the run and step of each result.",
)
@click.option(
    "--metric",
    metavar="accuracy|balanced_accuracy|macro_f1|nll|ece",
    help="Metric to show: nll is the negative log-likelihood, ece the expected calibration error  [default: accuracy; "
    "macro_f1 for iWildCam, and for your own data if the largest class has ten times the images of the smallest].",
)
@click.option(
    "--adaptation", is_flag=True, help="Show each algorithm as trained and with each method of `aidgn adapt`."
)
@click.option(
    "--spread",
    default="sd",
    type=click.Choice(["sd", "se"]),
    help="Print the standard deviation over trials (sd) or the standard error of the mean (se).",
)
@click.option("--paper", is_flag=True, help="Add the paper's numbers and the difference.")
@click.option(
    "--compare",
    is_flag=True,
    help="Also compare every two algorithms: paired differences with intervals and permutation tests, average ranks.",
)
@click.option("--algorithm", "algorithms", multiple=True, metavar="NAME", help="Show this row only; repeat for more.")
@click.option("--markdown", "formats", flag_value="markdown", multiple=True, help="Print Markdown.")
@click.option("--latex", "formats", flag_value="latex", multiple=True, help="Print LaTeX (booktabs).")
@click.option("--html", "formats", flag_value="html", multiple=True, help="Print an HTML fragment.")
@click.option("--csv", metavar="FILE", help="Also write all records to FILE as CSV; with --compare the differences.")
@click.option("--parquet", metavar="FILE", help="The same as Parquet.")
@click.option("--json", metavar="FILE", help="With --compare: write differences, tests and ranks to FILE as JSON.")
@click.option("--figures", metavar="DIR", help="With --compare: draw critical-difference figures to DIR (PNG and SVG).")
@click.option("--tidy", metavar="FILE", help="Also write a line per run and metric to FILE, CSV or .parquet.")
def table(
    folders: tuple[str, ...],
    selection: str,
    metric: str | None,
    adaptation: bool,
    spread: str,
    paper: bool,
    compare: bool,
    algorithms: tuple[str, ...],
    formats: tuple[str, ...],
    csv: str | None,
    parquet: str | None,
    json: str | None,
    figures: str | None,
    tidy: str | None,
) -> None:
    """Show the results of the runs below each FOLDER: mean and spread over trials, per unseen domain."""
    if len(formats) > 1:
        raise AidgnError(f"--{' and --'.join(formats)} each print the table: choose one.")
    if parquet and Path(parquet).suffix != ".parquet":
        raise AidgnError(f"--parquet {parquet} should end in .parquet.")
    if csv and Path(csv).suffix == ".parquet":
        raise AidgnError(f"--csv {csv} ends in .parquet: give the file with --parquet.")
    if (json or figures) and not compare:
        raise AidgnError(f"--{'json' if json else 'figures'} goes with --compare: add it.")
    for option, value in (("--compare", compare), ("--algorithm", algorithms), ("--tidy", tidy)):
        if adaptation and value:
            raise AidgnError(f"{option} does not go with --adaptation, whose table is of other runs.")
    if adaptation and selection.lower() != "training":
        raise AidgnError(
            f"--selection {selection} does not go with --adaptation: the runs to adapt are selected by "
            "training-domain validation."
        )
    if adaptation and metric not in (None, "accuracy"):
        raise AidgnError(f"--metric {metric} does not go with --adaptation, which measures accuracies.")
    from aidgn.report.table_formats import FORMATS

    files = [Path(file) for file in (csv, parquet) if file]
    made: list[Table] = []
    if adaptation:
        from aidgn.report.adaptation import adaptation_tables, load_adaptation, write_lines

        lines, notes = load_adaptation(folders)
        for file in files:
            write_lines(lines, file)
            click.echo(f"{len(lines)} lines in {file}", err=True)
        made += adaptation_tables(lines, spread, paper, notes)
    else:
        from aidgn.report.export import all_records_csv, write_tidy
        from aidgn.report.paper import paper_ablation
        from aidgn.report.table import keep_algorithms, tables
        from aidgn.runs.reader import read_runs

        method = selection.lower()
        records = keep_algorithms(read_runs(*folders), algorithms)
        shown = tables(records, method, spread, paper, metric)
        made += shown
        made += paper_ablation(shown) if paper else []
        if compare:
            made += _compare(
                records, method, metric or shown[0].metric, [*files, *([Path(json)] if json else [])], figures
            )
        for file in [] if compare else files:
            all_records_csv(records, file)
            click.echo(f"{len(records)} records in {file}", err=True)
        if tidy:
            click.echo(f"{write_tidy(records, method, tidy)} lines in {tidy}", err=True)
    format_table = FORMATS[formats[0] if formats else "terminal"]
    # The formats have escaped names, and the terminal's has codes for bold and underlined: print the text directly.
    click.echo("\n\n".join(map(format_table, made)), file=direct(sys.stdout))


def _compare(records: "Records", method: str, metric: str, files: list[Path], figures: str | None) -> "list[Table]":
    """Write the comparison of the algorithms to files and figures, and return its tables."""
    from aidgn.analysis.comparison import compare
    from aidgn.report.comparison import format_comparisons, write_comparisons

    comparisons = compare(records, method, metric)
    for file in files:
        write_comparisons(comparisons, file)
        count = sum(len(comparison.differences) for comparison in comparisons)
        click.echo(f"{count} differences in {file}", err=True)
    if figures:
        from aidgn.report.figures import save
        from aidgn.report.rank_figure import draw_ranks

        for comparison in comparisons:
            if figure := draw_ranks(comparison):
                click.echo(save(figure, Path(figures), f"ranks-{comparison.dataset or 'all'}")[0], err=True)
    return format_comparisons(comparisons, records, method)
