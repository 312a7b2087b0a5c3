"""aidgn status"""

import sys
import time
from contextlib import ExitStack

import click

from aidgn.errors import AidgnError, plural


@click.command(
    short_help="How a sweep stands: done, running, failed, left, speed, time left.",
    epilog="""\b
Examples:
  aidgn status runs/
  aidgn status runs/table1 --watch
  aidgn status runs/ --verify
Reads the folder alone, so it may be asked from any machine that sees it.""",
)
@click.argument("sweep", default="runs", metavar="[SWEEP]")
@click.option("--watch", is_flag=True, help="Keep looking until the sweep is over; Ctrl-C ends it.")
@click.option(
    "--every",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="With --watch, the time between two looks.",
)
@click.option(
    "--verify",
    "verifying",
    is_flag=True,
    help="Instead, compare the checksum of every file below the folder and list the damaged ones; exit code "
    "1 if there are any.",
)
@click.option("--all", "everything", is_flag=True, help="List every run that was set aside.")
def status(sweep: str, watch: bool, every: float, verifying: bool, everything: bool) -> None:
    """How the sweep in the folder SWEEP (runs, if none is given) stands."""
    if verifying:
        if watch:
            raise AidgnError("--verify reads all files once and --watch reads none: choose one of them.")
        verify_files(sweep)
        return

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from aidgn.sweeps.status import lines, look
    from aidgn.sweeps.store import SweepFolder

    folder = SweepFolder(sweep)
    shown = sys.maxsize if everything else 10
    found = look(folder)
    if not watch or not sys.stdout.isatty():
        click.echo("\n".join(lines(found, folder, shown)))
        while watch and not found.over:
            time.sleep(every)
            found = look(folder)
            counts = ", ".join(f"{found.counts[kind]} {kind}" for kind in ("done", "running", "failed", "left"))
            click.echo(f"{time.strftime('%H:%M:%S')} {counts}; time left: {found.time_left}")
        return
    with Live(console=Console(), refresh_per_second=4) as live:
        while True:
            live.update(Text("\n".join(lines(found, folder, shown))))
            if found.over:
                return
            time.sleep(every)
            found = look(folder)


def verify_files(folder: str) -> None:
    """Print which files below the folder are damaged; show progress once it takes two seconds."""
    from aidgn.cli.display import RunDisplay
    from aidgn.runs.checkpoints import verify

    began = time.monotonic()
    with ExitStack() as stack:
        display: RunDisplay | None = None

        def show(done: int, total: int) -> None:
            nonlocal display
            if display is None and time.monotonic() - began > 2:
                display = stack.enter_context(RunDisplay())
            if display is not None:
                display.update("verifying", done, total)

        found = verify([folder], show)
    for error in found.damaged:
        click.echo(str(error))
    unchecked = f", {found.unchecked} unchecked (written by 0.1.0)" if found.unchecked else ""
    click.echo(f"{folder}: {plural(found.files, 'file')} read, {len(found.damaged)} damaged{unchecked}")
    if found.damaged:
        sys.exit(1)
