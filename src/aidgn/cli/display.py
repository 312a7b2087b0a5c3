"""Standard output for tables, and the progress displays of commands."""

import sys

from aidgn.progress import NARROW, Output, RunDisplay, SweepDisplay, rate

__all__ = ["NARROW", "Output", "RunDisplay", "SweepDisplay", "rate", "wide_console"]


def wide_console(columns: int) -> Output:
    """Return standard output as wide as the terminal, or with so many columns if there is none."""
    return Output() if sys.stdout.isatty() else Output(width=columns, height=25)  # no height: TERM=dumb makes it 80
