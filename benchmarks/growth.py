"""Measure how processor time and memory of commands grow with the number of images and of runs.

    python benchmarks/growth.py --images 250 --runs 4

Each command runs on 1, 4 and 16 times the images (`data prepare`, `fit`) or runs (`table`, `status`, `report`). For
each command the script prints the time that a further image or run costs between 4 and 16 times, relative to that
between 1 and 4 times (1: the cost is flat), and the largest memory, relative to that of the smallest size.

Times are those of the processor, so that other work on the machine does not count. `report` shows one run per
algorithm and target, so that further trials should cost it little; the cost of its first maps is in no ratio.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

SIZES = (1, 4, 16)


def write_images(folder: Path, count: int) -> None:
    """Write JPEG images of two classes in three domains, each different from all others."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / "abc"[number % 3] / ("dark", "light")[number // 3 % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 128, (8, 8, 3), dtype=np.uint8) + np.uint8(64 * (number // 3 % 2))
        Image.fromarray(coarse).resize((160, 160), Image.Resampling.BICUBIC).save(path, quality=90)


def measure(command: list[str], temporary: Path) -> tuple[float, int]:
    """Run an aidgn command; return the seconds of the processor and the largest memory of a process in bytes."""
    environment = {**os.environ, "AIDGN_CACHE": str(temporary / "cache")}
    process = subprocess.Popen(
        [sys.executable, "-m", "aidgn", *command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert process.stderr is not None
    errors = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"aidgn {' '.join(command)} failed: {errors}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def describe(name: str, unit: str, base: int, results: list[tuple[float, int]]) -> str:
    """Compare the cost of further images or runs between sizes, and the memory at each size."""
    counts = [base * size for size in SIZES]
    seconds, memory = zip(*results, strict=True)
    steps = [(seconds[i + 1] - seconds[i]) / (counts[i + 1] - counts[i]) for i in range(2)]
    ratio = f"{steps[1] / steps[0]:.2f}" if steps[0] > 0 else "none"
    return (
        f"{name}: a further {unit} costs {ratio} of one before, and {steps[1] / seconds[0]:.4f} of the whole command "
        f"with {counts[0]}; memory {', '.join(f'{value / memory[0]:.2f}' for value in memory)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=250, help="images of the smallest size")
    parser.add_argument("--runs", type=int, default=4, help="runs of the smallest size, a multiple of 4")
    options = parser.parse_args()
    fit = ["--algorithm", "ERM", "--steps", "20", "--image-size", "28", "--backbone", "small", "--workers", "1"]
    results: dict[str, list[tuple[float, int]]] = {}
    for size in SIZES:
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder)
            pictures, sweep = temporary / "pictures", str(temporary / "sweep")
            write_images(pictures, options.images * size)
            results.setdefault("data prepare", []).append(measure(["data", "prepare", str(pictures)], temporary))
            fit_command = ["fit", str(pictures), *fit, "--out", str(temporary / "fit")]
            results.setdefault("fit", []).append(measure(fit_command, temporary))
            trials = str(options.runs * size // 4)
            words = ["sweep", "digits", "--algorithm", "ERM", "--steps", "4", "--eval-every", "1", "--workers", "1"]
            measure([*words, "--trials", trials, "--out", sweep, "--yes"], temporary)
            for command in ("table", "status"):
                results.setdefault(command, []).append(measure([command, sweep], temporary))
            page = ["report", sweep, "--out", str(temporary / "page.html")]
            results.setdefault("report", []).append(measure(page, temporary))
    for name, measured in results.items():
        unit, base = ("image", options.images) if name in ("data prepare", "fit") else ("run", options.runs)
        print(describe(name, unit, base, measured))
