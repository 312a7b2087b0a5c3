"""Compare the time of a whole `aidgn fit` on a frozen network with the bare forward passes that it needs.

    python benchmarks/frozen.py data/PACS --weights resnet50-he2015.safetensors --backbone resnet50

The script takes a sample of the pictures of a folder DATA/<domain>/<class>/<picture>. In each round it runs, one after
the other: a bare loop of the network over as many random images, with the batches and threads of `fit`; and `aidgn
fit`, from the start of the process to the report page, with decoding, features, nine trainings and the final model. The
bare loop is measured in a plain process and in one that keeps freed memory, as aidgn's processes do. Each has a new
cache.

Aim: `fit` takes at most 1.6 times as long as the bare loop.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LOOP = """
import sys, time, torch
from aidgn import backbones
from aidgn.devices import keep_freed_memory
from aidgn.training.frozen import CPU_BATCH
backbone, weights, count, size, kept = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
if kept == "kept":
    keep_freed_memory()
network = backbones.create(backbone, weights=weights).eval()
backbones.fold(network)
network = network.to(memory_format=torch.channels_last)
with torch.inference_mode():
    x = torch.randn(CPU_BATCH, 3, size, size).contiguous(memory_format=torch.channels_last)
    network(x)
    began, processor = time.perf_counter(), time.process_time()
    for start in range(0, count, CPU_BATCH):
        network(x[: count - start])
    print(time.perf_counter() - began, time.process_time() - processor, torch.get_num_threads())
"""


def sample(source: Path, target: Path, count: int) -> int:
    """Copy as many pictures of each domain, drawn at random; return their number."""
    draw = random.Random(0)
    domains = sorted(path for path in source.iterdir() if path.is_dir())
    copied = 0
    for domain in domains:
        files = sorted(path for path in domain.rglob("*") if path.is_file())
        for file in draw.sample(files, min(count // len(domains), len(files))):
            place = target / file.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, place)
            copied += 1
    return copied


def bare(options: argparse.Namespace, count: int, kept: str) -> tuple[float, float]:
    """Return the seconds of a bare loop by the clock and of the processor."""
    arguments = [options.backbone, options.weights, str(count), str(options.size), kept]
    printed = subprocess.run([sys.executable, "-c", LOOP, *arguments], check=True, capture_output=True, text=True)
    seconds, processor, _ = map(float, printed.stdout.split())
    return seconds, processor


def fit(options: argparse.Namespace, folder: Path) -> tuple[float, float, str]:
    """Return the seconds of a fit by the clock and of the processor, and its first line."""
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "aidgn", "fit", str(folder), "--out", f"{temporary}/fit", "--device", "cpu"]
        command += ["--backbone", options.backbone, "--weights", options.weights, "--image-size", str(options.size)]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        began = time.perf_counter()
        environment = {**os.environ, "AIDGN_CACHE": f"{temporary}/cache"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        seconds = time.perf_counter() - began
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor, done.stdout.splitlines()[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with a folder per domain")
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.weights = str(Path(options.weights).resolve())
    with tempfile.TemporaryDirectory() as temporary:
        count = sample(options.data, Path(temporary, "pictures"), options.images)
        times: dict[str, list[tuple[float, float]]] = {"plain loop": [], "loop": [], "fit": []}
        for _ in range(options.rounds):
            times["plain loop"].append(bare(options, count, "plain"))
            times["loop"].append(bare(options, count, "kept"))
            *seconds, line = fit(options, Path(temporary, "pictures"))
            times["fit"].append((seconds[0], seconds[1]))
            print(json.dumps({name: [round(value, 1) for value in values[-1]] for name, values in times.items()}))
    print(line)
    for number, clock in enumerate(("by the clock", "of the processor")):
        medians = {name: statistics.median(value[number] for value in values) for name, values in times.items()}
        print(
            f"{clock}: fit {medians['fit']:.1f} s, {medians['fit'] / medians['loop']:.2f} times the loop "
            f"({medians['loop']:.1f} s), {medians['fit'] / medians['plain loop']:.2f} times the plain one "
            f"({medians['plain loop']:.1f} s)"
        )
