"""aidgn status"""

import sys
import time

import click

from aidgn.errors import AidgnError, plural


@click.command(
    epilog="""\b
Examples:
  aidgn status runs/
  aidgn status runs/table1 --watch
  aidgn status runs/ --verify
The command reads only the folder, so it works on every machine that can read the folder.""",
)
@click.argument("sweep", default="runs", metavar="[SWEEP]")
@click.option("--watch", is_flag=True, help="Refresh until the sweep ends; Ctrl-C stops watching.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    metavar="SECONDS",
    help="Seconds between two refreshes with --watch.",
)
@click.option(
    "--verify",
    "verifying",
    is_flag=True,
    help="Compare the checksum of every file below the folder and list damaged files; exit with code 1 if there are "
    "any.",
)
@click.option("--all", "everything", is_flag=True, help="List all runs that were set aside.")
def status(sweep: str, watch: bool, every: float, verifying: bool, everything: bool) -> None:
    """Show how far the sweep in the folder SWEEP is  [default: runs]."""
    if verifying:
        if watch:
            raise AidgnError("--verify reads all files once and --watch reads none: choose one of them.")
        verify_files(sweep)
        return

    from rich.live import Live
    from rich.text import Text

    from aidgn.progress import Output
    from aidgn.sweeps.status import describe_status, read_status
    from aidgn.sweeps.store import SweepFolder

    folder = SweepFolder(sweep)
    shown = sys.maxsize if everything else 10
    now = read_status(folder)
    if not watch or not sys.stdout.isatty():
        click.echo("\n".join(describe_status(now, folder, shown)))
        while watch and not now.over:
            time.sleep(every)
            now = read_status(folder)
            counts = ", ".join(f"{now.counts[state]} {state}" for state in ("done", "running", "failed", "left"))
            click.echo(f"{time.strftime('%H:%M:%S')} {counts}; time left: {now.time_left}")
        return
    with Live(console=Output(), refresh_per_second=4) as live:
        while True:
            live.update(Text("\n".join(describe_status(now, folder, shown))))
            if now.over:
                return
            time.sleep(every)
            now = read_status(folder)


def verify_files(folder: str) -> None:
    """Print the damaged files below the folder."""
    from aidgn.progress import RunDisplay
    from aidgn.runs.checkpoints import verify

    with RunDisplay() as display:
        result = verify([folder], lambda done, total: display.update("verifying", done, total))
    for error in result.damaged:
        click.echo(str(error))
    unchecked = f", {result.unchecked} unchecked (written by an earlier version)" if result.unchecked else ""
    click.echo(f"{folder}: {plural(result.files, 'file')} read, {len(result.damaged)} damaged{unchecked}")
    if result.damaged:
        sys.exit(1)
