"""Measure the seconds from the command to the first training step and evaluation, stage by stage, cold and warm.

    python benchmarks/start.py PACS --target sketch --weights resnet50.safetensors
    python benchmarks/start.py --generate 2000                # without a data set: images of noise in the sizes of PACS

Each line is a new process that trains a short run with the product's `train`. The first process starts with an empty
cache of compiled code (cold), the next ones use what it left (warm). Decoded images are on disk before. Installers
compile Python files to bytecode; where the installation has none, a process before the first makes it.
"""

import argparse
import cProfile
import importlib.util
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("import", "data", "images to device", "network", "first step", "first evaluation", "finish")


class Clock:
    """Seconds that each stage took, from the start of the command on.

    Args:
        start: When the command started, by `time.time`.
        profile: Name of the stage to profile.
    """

    def __init__(self, start: float, profile: str | None):
        self.last = start
        self.seconds: dict[str, float] = {}
        self.profile = profile
        self.profiler = cProfile.Profile()

    def mark(self, stage: str) -> None:
        """End a stage, if it has not ended before."""
        if stage in self.seconds:
            return
        now = time.time()
        self.seconds[stage] = now - self.last
        self.last = now
        if stage == self.profile:
            self.profiler.disable()
            pstats.Stats(self.profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(45)
        following = STAGES[STAGES.index(stage) + 1] if stage != STAGES[-1] else None
        if following and following == self.profile:
            self.profiler.enable()

    def marking(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function so that its first call ends a stage."""

        def call(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            if stage not in self.seconds:
                synchronize()
                self.mark(stage)
            return result

        return call


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train_once(arguments: argparse.Namespace) -> None:
    """Train a short run and print the seconds of its stages as JSON."""
    clock = Clock(arguments.start, arguments.profile)
    from aidgn.training import RunSpec, setup, trainer

    clock.mark("import")
    load, create = setup.load_batches, setup.create_algorithm

    def load_batches(*given: Any, **options: Any) -> Any:
        clock.mark("data")
        return load(*given, **options)

    setup.load_batches = clock.marking("images to device", load_batches)
    setup.create_algorithm = clock.marking("network", create)
    trainer.Trainer.train_step = clock.marking("first step", trainer.Trainer.train_step)  # type: ignore[method-assign]
    trainer.Trainer.evaluate = clock.marking("first evaluation", trainer.Trainer.evaluate)  # type: ignore[method-assign]
    spec = RunSpec(
        arguments.data,
        arguments.algorithm,
        arguments.target,
        steps=arguments.steps,
        eval_every=arguments.eval_every,
        backbone=arguments.backbone,
        weights=arguments.weights,
        image_size=arguments.image_size,
    )
    with tempfile.TemporaryDirectory() as out:
        trainer.train(spec, out, device=arguments.device)
    clock.mark("finish")
    print(json.dumps(clock.seconds))


def compile_bytecode(folder: Path) -> dict[str, str]:
    """Return an environment in which all imports of a run find bytecode."""
    import torch

    if Path(importlib.util.cache_from_source(torch.__file__)).exists():
        return {}
    environment = {"PYTHONPYCACHEPREFIX": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    modules = "aidgn.training.trainer, timm, torch._dynamo, triton.compiler.compiler, triton.backends.nvidia.driver"
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, env={**os.environ, **environment})
    return environment


def measure(arguments: argparse.Namespace, data: str, caches: Path, environment: dict[str, str]) -> dict[str, float]:
    """Return the seconds of the stages in a new process."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if value is not None]
    options = [option for option in options if option.split("=")[0] not in ("--data", "--start", "--json", "--repeats")]
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(caches), "TRITON_CACHE_DIR": str(caches / "triton")}
    result = subprocess.run(
        [sys.executable, __file__, data, *options, f"--start={time.time()}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, **environment, **folders},
    )
    seconds: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return seconds


def generate(folder: Path, count: int) -> str:
    """Write images of noise, 227 pixels a side, in four domains and seven classes."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for number in range(count):
        path = folder / "noise" / f"site{number % 4}" / f"class{number // 4 % 7}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = random.integers(0, 256, (15, 15, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((227, 227)).save(path)
    return str(folder / "noise")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?")
    parser.add_argument("--generate", type=int, help="number of images of noise to train on")
    parser.add_argument("--target")
    parser.add_argument("--algorithm", default="AIDGN")
    parser.add_argument("--backbone")
    parser.add_argument("--weights", default="none")
    parser.add_argument("--image-size", type=int)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2, help="processes with a warm cache")
    parser.add_argument("--profile", choices=STAGES[1:], help="print where the time of a stage goes")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--start", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        train_once(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        data = generate(Path(folder), arguments.generate) if arguments.generate else arguments.data
        arguments.generate = None
        arguments.target = arguments.target or "site3"
        from aidgn.data import load_dataset
        from aidgn.data.cache import prepare

        dataset = load_dataset(data)
        prepare(dataset.with_image_size(arguments.image_size) if arguments.image_size else dataset)
        rows = {}
        environment = compile_bytecode(Path(folder, "bytecode"))
        for name in ("cold", *(f"warm {number + 1}" for number in range(arguments.repeats))):
            rows[name] = measure(arguments, data, Path(folder, "compiled"), environment)
            first_step = sum(rows[name][stage] for stage in STAGES[: STAGES.index("first step") + 1])
            stages = ", ".join(f"{stage} {rows[name][stage]:.1f}" for stage in STAGES)
            print(f"{name}: first step after {first_step:.1f} s, all {sum(rows[name].values()):.1f} s ({stages})")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
