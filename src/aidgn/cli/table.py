"""aidgn table"""

from pathlib import Path

import click


@click.command(short_help="Results of runs, ours or DomainBed's, as a table.", epilog="""\b
Examples:
  aidgn table runs/
  aidgn table runs/ --paper --selection oracle
  aidgn table sweep1/ sweep2/ --latex > table.tex
Folders written by DomainBed are read as they are.""")
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...")
@click.option("--selection", default="training", show_default=True, metavar="training|leave-one-out|oracle",
              help="Which run and step to believe.")
@click.option("--spread", default="sd", show_default=True, type=click.Choice(["sd", "se"]),
              help="What follows the plus-minus: standard deviation over trials, or standard error of the mean.")
@click.option("--paper", is_flag=True, help="Put the paper's numbers and the difference beside ours.")
@click.option("--markdown", "form", flag_value="markdown", help="Print Markdown.")
@click.option("--latex", "form", flag_value="latex", help="Print LaTeX (booktabs).")
@click.option("--html", "form", flag_value="html", help="Print an HTML fragment.")
@click.option("--csv", "csv", metavar="FILE", help="Write all records as CSV besides.")
def table(folders: tuple[str, ...], selection: str, spread: str, paper: bool, form: str | None,
          csv: str | None) -> None:
    """Results of the runs below each FOLDER: mean and spread over trials, per unseen domain."""
    from aidgn.report.table import all_records_csv, tables
    from aidgn.selection import read_runs

    records = read_runs(*folders)
    if csv:
        all_records_csv(records, Path(csv))
        click.echo(f"{len(records)} records in {csv}", err=True)
    for number, one in enumerate(tables(records, selection, spread, paper)):
        if number:
            click.echo()
        click.echo({None: one.to_terminal, "markdown": one.to_markdown, "latex": one.to_latex,
                    "html": one.to_html}[form]())
