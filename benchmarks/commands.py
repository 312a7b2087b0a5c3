"""Compare the processor time of commands between this version of the package and another one.

    git worktree add ../before v0.1.0
    python benchmarks/commands.py ../before/src --rounds 3

The script runs `demo`, then `report`, `adapt` and `diagnose` on its runs without stored features, by the other source
tree and by this one in turn. It prints the processor time of this tree relative to the other, the median over rounds.
Clock times mean nothing on a machine that others use, so they are only printed with --clock.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aidgn

STORED = ("features.npz", "embedding.npz", "diagnosis.json")
HERE = Path(aidgn.__file__).parents[1]


def measure(arguments: list[str], source: Path, cache: Path) -> tuple[float, float]:
    """Run an aidgn command by a source tree; return seconds of the processor, workers included, and of the clock."""
    environment = {**os.environ, "PYTHONPATH": str(source), "AIDGN_CACHE": str(cache)}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    finished = subprocess.run([sys.executable, "-m", "aidgn", *arguments], env=environment, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if finished.returncode:
        raise SystemExit(f"aidgn {' '.join(arguments)} failed: {finished.stderr.decode()}")
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return processor, time.monotonic() - began


def without_results(runs: Path, copy: Path) -> list[str]:
    """Copy runs without what commands store in them; return the two runs on the first domain and trial."""
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(runs, copy, ignore=shutil.ignore_patterns(*STORED, "*.html"))
    return sorted(map(str, copy.glob("digits-*-ink-trial0-*")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder src of another version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", default=["demo", "report", "adapt", "diagnose"])
    parser.add_argument("--clock", action="store_true", help="print seconds by the clock too")
    options = parser.parse_args()
    trees = {"before": options.source.resolve(), "now": HERE}
    seconds: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        runs, copy, cache = temporary / "runs", temporary / "copy", temporary / "cache"
        measure(["demo", "--out", str(runs)], trees["before"], cache)  # the runs that both read
        for _ in range(options.rounds):
            for command in options.only:
                for name, source in trees.items():
                    pair = without_results(runs, copy)
                    shutil.rmtree(temporary / "demo", ignore_errors=True)
                    arguments = {"demo": ["--out", str(temporary / "demo")], "diagnose": pair}.get(command, [str(copy)])
                    seconds.setdefault((command, name), []).append(measure([command, *arguments], source, cache))
    for command in options.only:
        before, now = seconds[command, "before"], seconds[command, "now"]
        ratio = statistics.median(b[0] / a[0] for a, b in zip(before, now, strict=True))
        clock = statistics.median(b[1] for b in now)
        print(f"{command:<10} {ratio:.2f} of the processor time" + (f"; {clock:.0f} s by the clock" * options.clock))
