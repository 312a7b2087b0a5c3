"""Measure the step of every algorithm relative to ERM's, and compare with the passes through the network it needs.

    python benchmarks/algorithms.py
    python benchmarks/algorithms.py --weights FILE     with pretrained weights batch norm is frozen and folded

A pass is a forward and a backward over the whole batch of three domains; ERM's step is one pass. A forward alone counts
as a third of a pass, and a pass through another network counts by its time. Some algorithms need a separate pass for
each domain: MLDG, and with live batch norm all whose domains DomainBed passes separately. Each of these passes has a
third of the batch and counts by its measured time, because small batches fill a GPU less. A step of at most 1.15 times
ERM's times the passes is `ok`, a longer one is `over` and makes the exit code 1. Blocks of steps alternate with ERM's,
on the same images on the device, through the code of training; ratios are medians over the repeats. Penalties that
get their weight late in a run have it from the first step here.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, Algorithm
from aidgn.algorithms.annealed import Annealed
from aidgn.algorithms.arm import ARM
from aidgn.algorithms.base import Minibatches
from aidgn.algorithms.dann import DANN
from aidgn.algorithms.fish import Fish
from aidgn.algorithms.mldg import MLDG
from aidgn.devices import begin_pass, choose_device, choose_precision
from aidgn.training.featurizer import create_featurizer

DOMAINS, CLASSES = 3, 7
BLOCK = 10  # steps timed together; even, as DANN alternates
WARM_UP = 20  # steps: compilation, and the replays before CUDA graphs settle
FORWARD = 1 / 3
ALLOWED = 1.15  # times ERM's step times the passes

# Why an algorithm needs more passes than one.
REASONS = {
    "SAM": "here and nearby",
    "SAGM": "here and nearby",
    "AIDGN-SAGM": "here and nearby",
    "MIRO": "and the forward of the frozen network",
    "SagNet": "content and adversary; style needs the forward only",
}
ONE_BY_ONE = (
    "GroupDRO",
    "Mixup",
    "CORAL",
    "MMD",
    "MTL",
    "EQRM",
    "CausIRL_CORAL",
    "CausIRL_MMD",
)  # domains, where batch norm is live


def count_passes(algorithm: Algorithm, x: Tensor, step: float, whole: float, single: float) -> tuple[float, str]:
    """Return the number of passes that the algorithm needs, and the reason.

    Args:
        algorithm: The algorithm.
        x: Images of all domains.
        step: Time of ERM's step.
        whole: Share of `step` for a forward and backward over all domains.
        single: The same over one domain.
    """
    if isinstance(algorithm, MLDG):
        return (
            2 * DOMAINS * single + 1 - whole,
            f"meta-train and meta-test of every pair, over one domain: {single:.2f} each",
        )
    if isinstance(algorithm, Fish):
        return DOMAINS * (single + 1 - whole), f"a step on every domain: {single + 1 - whole:.2f} each"
    if isinstance(algorithm, ARM):
        context = time_after_warm_up(lambda: algorithm.context(x), x.device) / step
        return 1 + context, f"and the forward of the context network, {context:.2f}"
    if isinstance(algorithm, DANN):
        z = torch.randn(len(x), algorithm.num_features, device=x.device, requires_grad=True)

        @torch.enable_grad()
        def discriminate() -> None:
            algorithm.discriminator(z).sum().backward()

        discriminator = time_after_warm_up(discriminate, x.device) / step
        return (
            (1 + FORWARD) / 2 + discriminator,
            f"every other update needs the forward only; the discriminator {discriminator:.2f} in each",
        )
    if algorithm.name() in ONE_BY_ONE and algorithm.live_batch_norms():
        return DOMAINS * single + 1 - whole, f"batch norm is live: domains one by one, {single:.2f} each"
    return algorithm.passes, REASONS.get(algorithm.name(), "")


def build(name: str, arguments: argparse.Namespace, precision: str, device: torch.device) -> Algorithm:
    kind = ALGORITHMS[name]
    given: dict[str, Any] = {"batch_size": arguments.batch_size}
    if issubclass(kind, Annealed):
        given[kind.anneal] = 0
    torch.manual_seed(0)
    network = create_featurizer(arguments.backbone, arguments.weights, 3 + kind.extra_channels, precision, device)
    return kind(network, CLASSES, DOMAINS, **given).to(device).train()


def time_calls(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Return the seconds per call of `work`."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        if cuda:
            begin_pass()
        work()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def time_after_warm_up(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds per call of `work` after a warm-up."""
    time_calls(work, device, WARM_UP)
    return time_calls(work, device, BLOCK)


def seconds(algorithm: Algorithm, batch: Minibatches, steps: int) -> float:
    """Return the seconds per step."""
    return time_calls(lambda: algorithm.update(batch), batch[0][0].device, steps)


def gradient_seconds(algorithm: Algorithm, batch: Minibatches, steps: int) -> float:
    """Return the seconds per forward and backward, without the optimiser."""

    def work() -> None:
        algorithm.objective(batch)["loss"].backward()
        algorithm.zero_grad()

    return time_calls(work, batch[0][0].device, steps)


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backbone", help=f"[default: {backbones.DEFAULT} on CUDA, {backbones.SMALL} elsewhere]")
    parser.add_argument("--weights", default="none", help="none, hub or a file  [default: none]")
    parser.add_argument("--batch-size", type=int, default=32, help="images per domain, of three  [default: 32]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--algorithm", action="append", choices=list(ALGORITHMS), help="only these; repeatable")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    precision = choose_precision("auto", device)
    arguments.backbone = arguments.backbone or (backbones.DEFAULT if device.type == "cuda" else backbones.SMALL)
    size = 28 if arguments.backbone == backbones.SMALL else 224

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(DOMAINS * arguments.batch_size, 3, size, size, generator=generator)
    x = x.to(device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(CLASSES, (len(x),), generator=generator).to(device)
    batch = list(zip(x.split(arguments.batch_size), y.split(arguments.batch_size), strict=True))
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(
        f"{machine}, torch {torch.__version__}, {arguments.backbone}, weights {arguments.weights}, {precision}, "
        f"{DOMAINS} x {arguments.batch_size} images of {size} x {size}, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'algorithm':<14} {'ms / step':>9} {'ratio':>6} {'passes':>6} {'ratio / passes':>14}", flush=True)
    over = []

    figures: dict[str, Any] = {
        "device": machine,
        "torch": torch.__version__,
        "backbone": arguments.backbone,
        "weights": arguments.weights,
        "precision": precision,
        "batch": [DOMAINS, arguments.batch_size, size],
        "algorithms": {},
    }
    baseline = build("ERM", arguments, precision, device)
    one = list(zip(*(part.tensor_split(DOMAINS) for part in batch[0]), strict=True))  # domain, as ERM takes it
    for each in (batch, one):
        seconds(baseline, each, WARM_UP)
        gradient_seconds(baseline, each, WARM_UP)
    shares = np.array(
        [
            (
                seconds(baseline, batch, BLOCK),
                gradient_seconds(baseline, batch, BLOCK),
                gradient_seconds(baseline, one, BLOCK),
            )
            for _ in range(arguments.repeats)
        ]
    )
    whole, single = np.median(shares[:, 1:] / shares[:, :1], axis=0)
    chosen = arguments.algorithm or list(ALGORITHMS)
    for name in sorted(chosen, key=lambda name: ALGORITHMS[name].extra_channels):  # another network compiles last
        algorithm = build(name, arguments, precision, device)
        seconds(algorithm, batch, WARM_UP)
        seconds(baseline, batch, 2)
        pairs = np.array(
            [(seconds(algorithm, batch, BLOCK), seconds(baseline, batch, BLOCK)) for _ in range(arguments.repeats)]
        )
        ratio = float(np.median(pairs[:, 0] / pairs[:, 1]))
        with torch.no_grad():
            passes, why = count_passes(algorithm, x, float(np.median(pairs[:, 1])), float(whole), float(single))
        step = 1e3 * float(np.median(pairs[:, 0]))
        verdict = "ok" if ratio <= ALLOWED * passes else "over"
        over += [name] * (verdict == "over")
        print(
            f"{name:<14} {step:>9.2f} {ratio:>6.2f} {passes:>6.2f} {ratio / passes:>14.2f} {verdict:>5}  {why}",
            flush=True,
        )
        figures["algorithms"][name] = {"ms": step, "ratio": ratio, "passes": passes, "verdict": verdict}
    print(
        f"over {ALLOWED:g} times the passes: {', '.join(over)}"
        if over
        else f"all {len(chosen)} within {ALLOWED:g} times the passes"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return len(over) > 0


if __name__ == "__main__":
    sys.exit(main())
