"""Standard output for tables, and the progress displays of commands."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from aidgn.progress import NARROW, Output, RunDisplay, SweepDisplay, rate
from aidgn.runs.accuracy_key import accuracy_key

__all__ = ["NARROW", "Output", "RunDisplay", "SweepDisplay", "rate", "selected", "validation", "wide_console"]


def wide_console(columns: int) -> Output:
    """Return standard output as wide as the terminal, or with so many columns if there is none."""
    return Output() if sys.stdout.isatty() else Output(width=columns, height=25)  # no height: TERM=dumb makes it 80


def validation(record: Mapping[str, Any]) -> float:
    """Return the mean accuracy on the validation images of the source domains."""
    args = record["args"]
    sources = [i for i in range(len(args["domains"])) if i not in args["test_envs"]]
    return sum(record[accuracy_key(i, "out")] for i in sources) / len(sources)


def selected(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the record that training-domain validation selects: the first with the highest accuracy."""
    return max(records, key=lambda record: (validation(record), -record["step"]))
