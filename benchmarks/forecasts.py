"""Compare the first forecast of the time left with the time that passes then.

    python benchmarks/forecasts.py
    python benchmarks/forecasts.py --data PACS --weights tf_efficientnet_lite0.safetensors

Each command runs once on the embedded digits; with --data, `data prepare` and `fit` on a frozen network follow. For
each part of a command that tells a time left, the script prints when the first time was told, that time, how long the
part took from then on, and the factor between both (aim: at most 1.5, in either direction). The last column is the
largest factor of the times told later, while 5 s or more were left. Parts that end before they tell a time are left
out, and a first forecast of less than 5 s is no miss. What is measured is what the bar of a terminal shows, which is
earlier than the lines of a log.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

AIM = 1.5
MIN_SECONDS = 5.0  # seconds; of shorter times a factor says little
CHILD = "AIDGN_FORECASTS_LOG"  # environment variable: the file that a child process writes


@dataclass
class Part:
    """A part of a command: its start and end, and the times left that were told, with the time of each."""

    began: float
    ended: float = 0.0
    over: bool = False
    told: list[tuple[float, float]] = field(default_factory=list)

    def factors(self) -> list[tuple[float, float]]:
        """Return the time left and the factor between it and the time told, for each that was told."""
        pairs = [(self.ended - now, left) for now, left in self.told]
        return [(true, max(left, 0.5) / max(true, 0.5)) for true, left in pairs]


def run_child(arguments: list[str]) -> None:
    """Run an aidgn command in this process and write every forecast that its displays show."""
    from aidgn import progress
    from aidgn.cli import main

    log = Path(os.environ.pop(CHILD)).open("w", buffering=1)  # noqa: SIM115
    owner = os.getpid()

    def note(part: str, left: float | None, over: bool) -> None:
        if os.getpid() == owner:
            log.write(json.dumps({"time": time.monotonic(), "part": part, "left": left, "over": over}) + "\n")

    update_run = progress.RunDisplay.update
    update_sweep = progress.SweepDisplay.update
    leave = progress.Display.__exit__

    def of_run(self: Any, work: str, done: int, total: int | None, *rest: Any, **named: Any) -> None:
        update_run(self, work, done, total, *rest, **named)
        note(work, None if done == total else self.seconds_left[work], done == total)

    def of_sweep(self: Any, number: int, event: str, value: Any) -> None:
        update_sweep(self, number, event, value)
        if event in ("step", "done"):
            note("runs", self.seconds_left, False)
        if event in ("prepare", "features"):
            done, total = value
            left = self.preparing[event][1].seconds_left(total)
            note(progress.PHASES[event], None if done == total else left, done == total)

    def left(self: Any, *error: object) -> None:
        leave(self, *error)
        if isinstance(self, progress.SweepDisplay):
            note("runs", None, True)

    progress.RunDisplay.update = of_run  # type: ignore[method-assign]
    progress.SweepDisplay.update = of_sweep  # type: ignore[method-assign]
    progress.Display.__exit__ = left  # type: ignore[method-assign]
    sys.argv = ["aidgn", *arguments]
    main()


def measure(arguments: list[str], temporary: Path) -> tuple[dict[str, Part], str]:
    """Run a command; return its parts by name, and what it printed."""
    log = temporary / "forecasts.jsonl"
    environment = {**os.environ, CHILD: str(log)}
    finished = subprocess.run([sys.executable, __file__, *arguments], env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise SystemExit(f"aidgn {' '.join(arguments)} failed: {finished.stderr}")
    parts: dict[str, Part] = {}
    for line in log.read_text().splitlines():
        entry = json.loads(line)
        part = parts.setdefault(entry["part"], Part(entry["time"]))
        if part.over:  # the same work again, for another run: the first is measured
            continue
        part.ended, part.over = entry["time"], entry["over"]
        if entry["left"] is not None:
            part.told.append((entry["time"], entry["left"]))
    return parts, finished.stdout + finished.stderr


def describe(name: str, part: Part) -> str:
    """Return a row of the table for a part that told a time left."""
    factors = part.factors()
    (true, first), later = factors[0], [max(f, 1 / f) for left, f in factors[1:] if left >= MIN_SECONDS]
    now, told = part.told[0]
    worst = f"{max(later):.2f}" if later else "-"
    kept = "" if 1 / AIM <= first <= AIM else ("  MISSED" if true >= MIN_SECONDS else "  too short")
    return f"{name:<40} {now - part.began:6.1f} {told:8.1f} {true:8.1f} {first:7.2f} {worst:>7}{kept}"


def describe_pass(text: str, parts: dict[str, Part]) -> list[str]:
    """Return the row of the time that `fit` tells for the pass through a frozen network, if it told one."""
    told = re.search(r"passes through it (?:once|\d+ times), about (\d+) (s|min)", text)
    part = parts.get("computing features")
    if told is None or part is None:
        return []
    seconds = int(told[1]) * (60 if told[2] == "min" else 1)
    true = part.ended - part.began
    return [f"{'fit: told before the start':<40} {0:6.1f} {seconds:8.1f} {true:8.1f} {seconds / true:7.2f} {'-':>7}"]


if __name__ == "__main__":
    if CHILD in os.environ:
        run_child(sys.argv[1:])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder or name of a data set of photographs")
    parser.add_argument("--weights", help="weights of tf_efficientnet_lite0, for --data")
    parser.add_argument("--only", help="only commands whose name has this text")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        temporary = Path(folder)
        os.environ["AIDGN_CACHE"] = str(temporary / "cache")
        demo, uneven = str(temporary / "demo"), str(temporary / "uneven")
        train = ["train", "digits", "--target", "ink", "--steps", "1500", "--out", str(temporary / "runs")]
        algorithms = [word for name in ("ERM", "SagNet", "AIDGN") for word in ("--algorithm", name)]
        sweep = ["sweep", "digits", *algorithms, "--target", "ink", "--trials", "3", "--steps", "300"]
        commands = {
            "train": train,
            "demo": ["demo", "--out", demo],
            "sweep, 9 runs of unlike algorithms": [*sweep, "--workers", "2", "--out", uneven, "--yes"],
            "report": ["report", demo, "--points", "1900"],  # other points than the demo's, so that t-SNE is new
            "adapt": ["adapt", demo],
        }
        if options.data:
            commands["data prepare"] = ["data", "prepare", options.data]
            network = ["--backbone", "tf_efficientnet_lite0", "--weights", str(options.weights)]
            commands["fit"] = ["fit", options.data, *network, "--out", str(temporary / "fit")]
        print(f"{'part':<40} {'at':>6} {'told':>8} {'true':>8} {'factor':>7} {'worst':>7}")
        for name, arguments in commands.items():
            if options.only and options.only not in name:
                continue
            parts, text = measure(arguments, temporary)
            rows = [describe(f"{name}: {part}", timed) for part, timed in parts.items() if timed.told]
            rows += describe_pass(text, parts)
            print("\n".join(rows) or f"{name:<40} over before a time could be told", flush=True)
