"""aidgn demo"""

from shlex import quote

import click

from aidgn.errors import AidgnError, plural

ALGORITHMS = ("ERM", "AIDGN")
LEARNING_RATE = 2e-3  # the same for both, so that only the objectives differ
BATCH_SIZE = 32  # per domain; half of the default gives the same table in half the time
POINTS = 500  # images in the report's maps of features; fewer than the default, to save time
PERMUTATIONS = 199
MAX_WORKERS = 8


@click.command(
    epilog="""\b
Example:
  aidgn demo""",
)
@click.option("--out", default="runs/demo", metavar="DIR", help="Folder for the run folders.")
@click.option("--steps", type=int, metavar="N", help="Updates per run  [default: the number that suits the data set].")
@click.option("--trials", default=3, metavar="N", help="Repeat each run with N different splits and seeds.")
def demo(out: str, steps: int | None, trials: int) -> None:
    """Train ERM and AIDGN on handwritten digits in four visual styles, with each style unseen in turn; print a table
    and write a report to open in a browser. The demo takes a minute or two on a laptop.

    The same command continues an interrupted demo and shows the results of a finished demo."""
    from pathlib import Path

    import aidgn
    from aidgn.data.row_cache import usable_cores
    from aidgn.progress import RunDisplay
    from aidgn.report.page import write_report
    from aidgn.report.table_formats import to_terminal

    dataset = aidgn.load_dataset("digits")
    number = len(ALGORITHMS) * len(dataset.domains) * trials
    click.echo(
        f"{len(dataset)} handwritten digits in {len(dataset.domains)} styles: {', '.join(dataset.domains)}.\n"
        f"Each style in turn is never seen in training; {len(ALGORITHMS)} algorithms, "
        f"{plural(trials, 'trial')}: {plural(number, 'run')}.",
        err=True,
    )
    runs = aidgn.sweep(
        ["digits"],
        ALGORITHMS,
        out=out,
        trials=trials,
        steps=steps,
        lr=LEARNING_RATE,
        hyper_parameters={"batch_size": BATCH_SIZE},
        workers=min(usable_cores(), MAX_WORKERS),
        device="cpu",
    )
    if runs.failures:
        raise AidgnError(f"{plural(len(runs.failures), 'run')} failed; the first: {next(iter(runs.failures.values()))}")
    click.echo(to_terminal(runs.table()))
    with RunDisplay() as progress:
        page = write_report(
            [out],
            Path(out) / "report.html",
            device="cpu",
            points=POINTS,
            permutations=PERMUTATIONS,
            on_progress=progress.update,
        )
    click.echo(f"""
Each column is a style that was never seen in training. ERM minimises the cross entropy on the other three together;
AIDGN classifies by angle, with a margin from feature norms. Learning rate ({LEARNING_RATE:g}), images and steps are the
same. A few trials on {len(dataset)} small images show how it works, not which is better.

The report is {page}. Open it in a browser to see the curves, the latent space of both algorithms
and whether AIDGN's two assumptions hold here. The run folders are in the same place.

Try next:
  aidgn train digits --algorithm AIDGN --target {dataset.domains[0]} --set beta=0.1
  aidgn algorithms AIDGN --small
  aidgn table {quote(out)} --selection oracle
Your own pictures go into FOLDER/<domain>/<class>/; `aidgn data check FOLDER` inspects them.""")
