"""Compare a whole training run and its parts with a plain reference in DomainBed's manner, in one process on one GPU.

    python benchmarks/training.py DATA --weights FILE --target sketch --steps 5000 --eval-every 50

The reference decodes every image again in DataLoader workers, augments with PIL, computes in NCHW with TF32 and an Adam
that is not fused, and evaluates every split, with workers that stay between evaluations. It is measured over
--reference-steps steps and --reference-evals evaluations, after one of each kind that warms up, and extrapolated
linearly to the whole run. Ours is the product's `train`, after a short run that compiles.

The first convolution is measured alone, too, forward and backward: on 2 x 2 blocks of pixels, as on CUDA the product
computes it, against the plain 7 x 7 one of stride 2, both compiled, in turn.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data import Dataset as TorchDataset
from torchvision import transforms as T

from aidgn import backbones
from aidgn.algorithms import create
from aidgn.data import load_dataset, train_val_indices
from aidgn.data.cache import prepare
from aidgn.data.loader import BatchSampler, DeviceImageStore
from aidgn.data.transforms import MEAN, STD, build_transforms
from aidgn.devices import begin_pass, choose_device, choose_precision
from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, train
from aidgn.training.evaluation import Splits, evaluate
from aidgn.training.featurizer import create_featurizer


class Files(TorchDataset):
    """Images that PIL decodes from their files on every access."""

    def __init__(self, dataset, indices, transform):
        self.paths = [f"{dataset.root}/{dataset.files[i]}" for i in indices]
        self.labels, self.transform = [int(dataset.labels[i]) for i in indices], transform

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, i):
        return self.transform(Image.open(self.paths[i]).convert("RGB")), self.labels[i]


def reference(dataset, arguments, device):
    """Return the seconds per step and per evaluation of the reference."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    normalise = [T.ToTensor(), T.Normalize(MEAN, STD)]
    augmented = T.Compose(
        [
            T.RandomResizedCrop(224, scale=(0.7, 1.0)),
            T.RandomHorizontalFlip(),
            T.ColorJitter(0.3, 0.3, 0.3, 0.3),
            T.RandomGrayscale(),
            *normalise,
        ]
    )
    clean = T.Compose([T.Resize((224, 224)), *normalise])
    target = dataset.find_domain(arguments.target)
    sources = [d for d in range(len(dataset.domains)) if d != target]
    loaders, evaluations = [], []
    for domain in range(len(dataset.domains)):
        indices = dataset.indices(domain)
        training, validation = (indices[part] for part in train_val_indices(len(indices), 0, domain))
        transform = clean if domain == target else augmented
        if domain in sources:
            files = Files(dataset, training, augmented)
            sampler = RandomSampler(files, replacement=True, num_samples=10**9)
            loaders.append(
                iter(
                    DataLoader(
                        files, arguments.batch_size, sampler=sampler, drop_last=True, num_workers=arguments.workers
                    )
                )
            )
        evaluations += [
            DataLoader(
                Files(dataset, part, transform),
                64,
                num_workers=arguments.workers,
                persistent_workers=arguments.workers > 0,
            )
            for part in (training, validation)
        ]
    network = backbones.create(arguments.backbone, weights=arguments.weights).to(device)
    network = nn.Sequential(network, nn.Linear(network.num_features, len(dataset.classes)).to(device))
    optimizer = torch.optim.Adam(network.parameters(), lr=5e-5, foreach=False)

    def step():
        batches = [next(loader) for loader in loaders]
        x = torch.cat([x for x, _ in batches]).to(device)
        y = torch.cat([y for _, y in batches]).to(device)
        loss = nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def evaluate():
        with torch.no_grad():
            for loader in evaluations:
                for x, y in loader:
                    (network(x.to(device)).argmax(1) == y.to(device)).float().sum().item()

    for _ in range(10):
        step()
    evaluate()  # starts the workers, which stay
    seconds = {}
    for name, action, times in (
        ("step", step, arguments.reference_steps),
        ("evaluation", evaluate, arguments.reference_evals),
    ):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(device)
        seconds[name] = (time.perf_counter() - began) / times
    return seconds


def parts(dataset, arguments, device):
    """Return the seconds of our step, of its input pipeline and of an evaluation, each measured alone."""
    precision = choose_precision(arguments.precision, device)
    prepared = prepare(dataset)
    images = DeviceImageStore(prepared, device)
    splits = Splits.of(prepared.dataset, 0)
    target = dataset.find_domain(arguments.target)
    sources = [d for d in range(len(dataset.domains)) if d != target]
    algorithm = create(
        arguments.algorithm,
        create_featurizer(arguments.backbone, arguments.weights, 3, precision, device),
        len(dataset.classes),
        len(sources),
    ).to(device)
    draws = BatchSampler([splits.train[d] for d in sources], arguments.batch_size, 0)
    augmented, clean = build_transforms(dataset.image_size, dataset.info.augment, images.exact_fit)
    indices, uniforms = draws.steps(0, 20)
    uniforms = uniforms.to(device)

    def inputs():
        for (pixels, geometry, labels), uniform in zip(images.batches(list(indices)), uniforms, strict=True):
            yield augmented(pixels, geometry, uniform), labels

    batches = list(inputs())
    size = arguments.batch_size

    def update(x, y):
        begin_pass()
        algorithm.update(list(zip(x.split(size), y.split(size), strict=True)))

    def whole():
        for x, y in inputs():
            update(x, y)

    def bare():
        for x, y in batches:
            update(x, y)

    def only_inputs():
        for _ in inputs():
            pass

    groups = [splits.train[target], *splits.val]

    def evaluate_all():
        evaluate(algorithm, images, groups, clean)

    seconds = {}
    for name, action, per in (
        ("step", whole, 20),
        ("step without input", bare, 20),
        ("input", only_inputs, 20),
        ("evaluation", evaluate_all, 1),
    ):
        for _ in range(3):
            action()
        times = []
        for _ in range(arguments.repeats):
            synchronize(device)
            began = time.perf_counter()
            action()
            synchronize(device)
            times.append((time.perf_counter() - began) / per)
        seconds[name] = float(np.median(times))
    seconds["images per evaluation"] = sum(map(len, groups))
    return seconds


def stem(arguments, device):
    """Return the seconds of a ResNet's first convolution, forward and backward, in both equivalent forms."""
    precision = choose_precision(arguments.precision, device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3 * arguments.batch_size, 3, arguments.stem_size, arguments.stem_size, generator=generator)
    x = x.to(device).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(64, 3, 7, 7, generator=generator).mul_(0.05).to(device).requires_grad_()
    bias = torch.zeros(64, device=device, requires_grad=True)
    forms = {
        "blocks": backbones.stem_convolution,
        "plain": lambda x, weight, bias: nn.functional.conv2d(x, weight, bias, stride=2, padding=3),
    }
    steps, results = {}, {}
    for name, form in forms.items():

        def compute(x, weight, bias, form=form):
            with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16"):
                return form(x, weight, bias).float().square().mean()

        function = torch.compile(compute, dynamic=False) if device.type == "cuda" else compute

        def step(function=function):
            weight.grad = bias.grad = None
            loss = function(x, weight, bias)
            loss.backward()
            return loss

        for _ in range(3):
            results[name] = step().item()
        steps[name] = step
    assert abs(results["blocks"] / results["plain"] - 1) < 1e-2, results
    times = {name: [] for name in steps}
    for _ in range(arguments.repeats):
        for name, step in steps.items():
            synchronize(device)
            began = time.perf_counter()
            for _ in range(20 if device.type == "cuda" else 1):
                step()
            synchronize(device)
            times[name].append((time.perf_counter() - began) / (20 if device.type == "cuda" else 1))
    return {name: float(np.median(each)) for name, each in times.items()}


def whole_run(arguments):
    """Return the clock seconds of the product's run, with decoded data on disk and compiled code."""

    def run(steps, out):
        spec = RunSpec(
            arguments.data,
            arguments.algorithm,
            arguments.target,
            steps=steps,
            eval_every=arguments.eval_every,
            backbone=arguments.backbone,
            weights=arguments.weights,
            hyper_parameters={"batch_size": arguments.batch_size},
        )
        began = time.perf_counter()
        folder = train(spec, out, device=arguments.device, precision=arguments.precision)
        return time.perf_counter() - began, folder

    with tempfile.TemporaryDirectory() as out:
        compiling, _ = run(2 * arguments.eval_every, out)
        seconds, folder = run(arguments.steps, arguments.out or out)
        records = RunFolder(folder).records
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        return {
            "first run": compiling,
            "run": seconds,
            "memory GiB": memory,
            "step in run": float(np.median([r["step_time"] for r in records])),
            "evaluation in run": float(np.mean([r["eval_time"] for r in records[1:]])),
        }


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--weights", default="none")
    parser.add_argument("--backbone", default=backbones.DEFAULT)
    parser.add_argument("--algorithm", default="AIDGN")
    parser.add_argument("--target", default="sketch")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=8, help="DataLoader workers per loader of the reference")
    parser.add_argument("--reference-steps", type=int, default=200)
    parser.add_argument("--reference-evals", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--stem-size", type=int, default=224, help="pixels of the images that the stem is measured on")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", help="keep the whole run here")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    device = choose_device(arguments.device)
    dataset = load_dataset(arguments.data)
    figures = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    figures["ours, parts"] = ours = parts(dataset, arguments, device)
    figures["stem"] = first = stem(arguments, device)
    figures["ours, whole run"] = run = whole_run(arguments)
    figures["reference"] = plain = reference(dataset, arguments, device)
    batch = (len(dataset.domains) - 1) * arguments.batch_size
    evaluations = -(-arguments.steps // arguments.eval_every)
    total = arguments.steps * plain["step"] + evaluations * plain["evaluation"]
    print(json.dumps(figures, indent=1))
    print(
        f"step: {ours['step'] * 1e3:.2f} ms, {batch / ours['step']:.0f} images/s; input alone "
        f"{ours['input'] / ours['step']:.1%} of it; without input {batch / ours['step without input']:.0f} images/s"
    )
    print(
        f"first convolution, forward and backward: {first['blocks'] * 1e3:.2f} ms on 2 x 2 blocks of pixels, "
        f"{first['plain'] * 1e3:.2f} ms in the plain form, ratio {first['plain'] / first['blocks']:.2f}"
    )
    print(f"evaluation: {ours['evaluation']:.3f} s for {ours['images per evaluation']} images")
    print(
        f"reference: {plain['step'] * 1e3:.1f} ms a step, {plain['evaluation']:.2f} s an evaluation, "
        f"{total:.0f} s for the run (extrapolated from {arguments.reference_steps} steps, "
        f"{arguments.reference_evals} evaluations)"
    )
    print(
        f"whole run of {arguments.steps} steps, {evaluations} evaluations: {run['run']:.1f} s, "
        f"{total / run['run']:.1f} times faster than the reference"
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
