"""aidgn status"""

import sys
import time

import click


@click.command(short_help="How a sweep stands: done, running, failed, left, speed, time left.", epilog="""\b
Examples:
  aidgn status runs/
  aidgn status runs/table1 --watch
Reads the folder alone, so it may be asked from any machine that sees it.""")
@click.argument("sweep", default="runs", metavar="[SWEEP]")
@click.option("--watch", is_flag=True, help="Keep looking until the sweep is over; Ctrl-C ends it.")
@click.option("--every", type=click.FloatRange(min=0.1), default=5.0, show_default=True, metavar="SECONDS",
              help="With --watch, the time between two looks.")
@click.option("--all", "everything", is_flag=True, help="List every run that was set aside.")
def status(sweep: str, watch: bool, every: float, everything: bool) -> None:
    """How the sweep in the folder SWEEP (runs, if none is given) stands."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from aidgn.sweep.folder import SweepFolder
    from aidgn.sweep.status import lines, look

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
