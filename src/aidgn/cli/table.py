"""aidgn table"""

from pathlib import Path

import click

from aidgn.errors import AidgnError


@click.command(
    epilog="""\b
Examples:
  aidgn table runs/
  aidgn table runs/ --paper --selection oracle
  aidgn table runs/ --adaptation --paper
  aidgn table runs/ --metric macro_f1
  aidgn table sweep1/ sweep2/ --latex > table.tex
The command also reads folders that DomainBed wrote.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--selection",
    default="training",
    show_default=True,
    metavar="training|leave-one-out|oracle",
    help="Method that selects the run and step of each result.",
)
@click.option(
    "--metric",
    default="accuracy",
    show_default=True,
    metavar="accuracy|balanced_accuracy|macro_f1|nll|ece",
    help="Metric to show: nll is the negative log-likelihood, ece the expected calibration error.",
)
@click.option(
    "--adaptation", is_flag=True, help="Show each algorithm as trained and with each method of `aidgn adapt`."
)
@click.option(
    "--spread",
    default="sd",
    show_default=True,
    type=click.Choice(["sd", "se"]),
    help="Print the standard deviation over trials (sd) or the standard error of the mean (se).",
)
@click.option("--paper", is_flag=True, help="Add the paper's numbers and the difference.")
@click.option("--markdown", "formats", flag_value="markdown", multiple=True, help="Print Markdown.")
@click.option("--latex", "formats", flag_value="latex", multiple=True, help="Print LaTeX (booktabs).")
@click.option("--html", "formats", flag_value="html", multiple=True, help="Print an HTML fragment.")
@click.option("--csv", metavar="FILE", help="Also write all records to FILE as CSV.")
@click.option("--parquet", metavar="FILE", help="Also write all records to FILE as Parquet.")
def table(
    folders: tuple[str, ...],
    selection: str,
    metric: str,
    adaptation: bool,
    spread: str,
    paper: bool,
    formats: tuple[str, ...],
    csv: str | None,
    parquet: str | None,
) -> None:
    """Show the results of the runs below each FOLDER: mean and spread over trials, per unseen domain."""
    if len(formats) > 1:
        raise AidgnError(f"--{' and --'.join(formats)} each print the table: choose one.")
    if parquet and Path(parquet).suffix != ".parquet":
        raise AidgnError(f"--parquet {parquet} should end in .parquet.")
    if csv and Path(csv).suffix == ".parquet":
        raise AidgnError(f"--csv {csv} ends in .parquet: give the file with --parquet.")
    if adaptation and selection.lower() != "training":
        raise AidgnError(
            f"--selection {selection} does not go with --adaptation: the runs to adapt are selected by "
            "training-domain validation."
        )
    if adaptation and metric != "accuracy":
        raise AidgnError(f"--metric {metric} does not go with --adaptation, which measures accuracies.")
    from aidgn.report.table_formats import FORMATS

    files = [Path(file) for file in (csv, parquet) if file]
    if adaptation:
        from aidgn.report.adaptation import adaptation_tables, load_adaptation, write_lines

        lines, notes = load_adaptation(folders)
        for file in files:
            write_lines(lines, file)
            click.echo(f"{len(lines)} lines in {file}", err=True)
        made = adaptation_tables(lines, spread, paper, notes)
    else:
        from aidgn.report.export import all_records_csv
        from aidgn.report.paper import paper_ablation
        from aidgn.report.table import tables
        from aidgn.selection import read_runs

        records = read_runs(*folders)
        for file in files:
            all_records_csv(records, file)
            click.echo(f"{len(records)} records in {file}", err=True)
        made = tables(records, selection.lower(), spread, paper, metric)
        made += paper_ablation(made) if paper else []
    format_table = FORMATS[formats[0] if formats else "terminal"]
    click.echo("\n\n".join(map(format_table, made)))
