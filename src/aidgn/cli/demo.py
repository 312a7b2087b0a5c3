"""aidgn demo"""

from shlex import quote

import click

from aidgn.errors import AidgnError, plural

ALGORITHMS = ("ERM", "AIDGN")
RATE = 2e-3  # for both, so that it is the objectives that are compared
POINTS, PERMUTATIONS = 500, 199  # of the report: fewer than otherwise, for the time they take


@click.command(
    short_help="The whole story on handwritten digits, in a minute or two.",
    epilog="""\b
Example:
  aidgn demo""",
)
@click.option("--out", default="runs/demo", show_default=True, metavar="DIR", help="Where run folders are.")
@click.option("--steps", type=int, metavar="N", help="Updates per run  [default: the data set's].")
@click.option("--trials", default=3, show_default=True, metavar="N", help="Repetitions with other splits and seeds.")
def demo(out: str, steps: int | None, trials: int) -> None:
    """ERM and AIDGN on handwritten digits in four visual styles, each style unseen once: trained, compared in a table,
    and looked into in a report to open in a browser. A minute or two on a laptop.

    Run again, it continues what was interrupted and shows what is finished."""
    from pathlib import Path

    from aidgn.cli.display import RunDisplay, SweepDisplay
    from aidgn.data import load_dataset
    from aidgn.data.cache import usable_cores
    from aidgn.report.page import write_report
    from aidgn.report.table import tables
    from aidgn.report.table_formats import to_terminal
    from aidgn.selection import read_runs
    from aidgn.sweeps.launchers.local import LocalLauncher
    from aidgn.sweeps.plan import plan_runs

    dataset = load_dataset("digits")
    specs = plan_runs(["digits"], ALGORITHMS, trials=trials, steps=steps, hyper_parameters={"lr": RATE})
    click.echo(
        f"{len(dataset)} handwritten digits in {len(dataset.domains)} styles: {', '.join(dataset.domains)}.\n"
        f"Each style in turn is never seen in training; {len(ALGORITHMS)} algorithms, "
        f"{plural(trials, 'trial')}: {plural(len(specs), 'run')}.",
        err=True,
    )
    with SweepDisplay(specs) as display:
        launcher = LocalLauncher(workers=min(usable_cores(), 8))
        failed = launcher.run(specs, out, on_event=display.update, device="cpu")
    if failed:
        raise AidgnError(f"{plural(len(failed), 'run')} failed; the first: {next(iter(failed.values()))}")

    folders = sorted(display.folders.values())
    for table in tables(read_runs(*folders), "training", "sd", False):
        click.echo(to_terminal(table))
    alone = len(read_runs(out).runs) == len(folders)
    with RunDisplay() as progress:
        page = write_report(
            [out] if alone else folders,
            Path(out) / "report.html",
            device="cpu",
            points=POINTS,
            permutations=PERMUTATIONS,
            on_progress=progress.update,
        )
    click.echo(f"""
Each column is a style that was never seen in training. ERM minimises the cross entropy on the three others pooled;
AIDGN classifies by angle, with a margin from feature norms; the same learning rate ({RATE:g}), images and steps.
A few trials on {len(dataset)} small images show how it works, not which is better.

The report is {page}: open it in a browser to see the curves, the latent space of both
and whether AIDGN's two assumptions hold here. The run folders are beside it.

Try next:
  aidgn train digits --algorithm AIDGN --target {dataset.domains[0]} --set beta=0.1
  aidgn algorithms AIDGN --small
  aidgn table {quote(out)} --selection oracle
Your own pictures go into FOLDER/<domain>/<class>/; `aidgn data check FOLDER` looks them through.""")
