"""aidgn table"""

from pathlib import Path

import click

from aidgn.errors import AidgnError


@click.command(
    short_help="Results of runs, ours or DomainBed's, as a table.",
    epilog="""\b
Examples:
  aidgn table runs/
  aidgn table runs/ --paper --selection oracle
  aidgn table runs/ --adaptation --paper
  aidgn table sweep1/ sweep2/ --latex > table.tex
Folders written by DomainBed are read as they are.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option(
    "--selection",
    default="training",
    show_default=True,
    metavar="training|leave-one-out|oracle",
    help="Which run and step to believe.",
)
@click.option("--adaptation", is_flag=True, help="Each algorithm as trained and under each method of `aidgn adapt`.")
@click.option(
    "--spread",
    default="sd",
    show_default=True,
    type=click.Choice(["sd", "se"]),
    help="What follows the plus-minus: standard deviation over trials, or standard error of the mean.",
)
@click.option("--paper", is_flag=True, help="Put the paper's numbers and the difference beside ours.")
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--latex", is_flag=True, help="Print LaTeX (booktabs).")
@click.option("--html", is_flag=True, help="Print an HTML fragment.")
@click.option("--csv", metavar="FILE", help="Write all records as CSV besides.")
@click.option("--parquet", metavar="FILE", help="Write all records as Parquet besides.")
def table(
    folders: tuple[str, ...],
    selection: str,
    adaptation: bool,
    spread: str,
    paper: bool,
    markdown: bool,
    latex: bool,
    html: bool,
    csv: str | None,
    parquet: str | None,
) -> None:
    """Results of the runs below each FOLDER: mean and spread over trials, per unseen domain."""
    forms = [form for form, given in (("markdown", markdown), ("latex", latex), ("html", html)) if given]
    if len(forms) > 1:
        raise AidgnError(f"--{' and --'.join(forms)} each print the table: choose one.")
    if parquet and Path(parquet).suffix != ".parquet":
        raise AidgnError(f"--parquet {parquet} should end in .parquet.")
    if csv and Path(csv).suffix == ".parquet":
        raise AidgnError(f"--csv {csv} ends in .parquet: --parquet writes that form.")
    selection = selection.lower()
    files = [Path(file) for file in (csv, parquet) if file]
    if adaptation:
        if selection != "training":
            raise AidgnError(
                f"--selection {selection} does not go with --adaptation: the runs that are adapted are "
                "chosen by training-domain validation."
            )
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
        made = tables(records, selection, spread, paper)
        made += paper_ablation(made) if paper else []
    for number, one in enumerate(made):
        if number:
            click.echo()
        click.echo(getattr(one, f"to_{[*forms, 'terminal'][0]}")())
