"""Compare a ResNet that fuses the ReLUs and shortcuts of its blocks into the convolutions with one that does not.

The script measures the training step (forward, backward and Adam) and bare inference of both in turn, and how far their
results differ. The step of the fused network is recorded as CUDA graphs, the step of the other is compiled.

    python benchmarks/fusion.py --weights resnet50-he2015.safetensors

The networks differ only on CUDA: elsewhere both compute the same.
"""

import argparse
import time

import torch
from torch import Tensor

from aidgn import backbones
from aidgn.backbones import unfuse
from aidgn.devices import begin_pass, choose_device, choose_precision
from aidgn.training.featurizer import EVAL_BATCH, Featurizer


def build(fused: bool, options: argparse.Namespace, device: torch.device) -> Featurizer:
    torch.manual_seed(0)
    net = backbones.create(options.backbone, weights=options.weights, freeze_bn=True)
    backbones.fold(net)
    if not fused:
        unfuse(net)
    net = net.to(device).to(memory_format=torch.channels_last)
    return Featurizer(net, choose_precision("auto", device), compiled=device.type == "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default=backbones.DEFAULT)
    parser.add_argument("--weights", default="none")
    parser.add_argument("--images", type=int, default=96, help="of a training step")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5, help="the fastest of so many, taken in turns, counts")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    device = choose_device(options.device)
    size = 3, options.image_size, options.image_size
    networks = {name: build(name == "inside", options, device) for name in ("inside", "behind")}
    optimizers = {name: torch.optim.Adam(each.parameters(), lr=1e-12, fused=True) for name, each in networks.items()}
    x, many = torch.randn(options.images, *size, device=device), torch.randn(EVAL_BATCH, *size, device=device)

    def step(name: str) -> Tensor:
        begin_pass()
        features = networks[name](x)
        features.square().mean().backward()
        gradients[name] = torch.cat([p.grad.flatten() for p in networks[name].parameters() if p.grad is not None])
        optimizers[name].step()
        optimizers[name].zero_grad()
        return features.detach()

    @torch.no_grad()
    def inference(name: str) -> Tensor:
        return networks[name].runner.compute(many.contiguous(memory_format=torch.channels_last))

    def seconds(work, name: str, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            work(name)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / times

    gradients: dict[str, Tensor] = {}
    inside, behind = step("inside"), step("behind")
    cosine = torch.nn.functional.cosine_similarity
    print(
        f"features differ by {((inside - behind).norm() / behind.norm()).item():.1e} of their length, gradients' "
        f"cosine {cosine(gradients['inside'].double(), gradients['behind'].double(), dim=0).item():.6f}",
        flush=True,
    )
    for what, work, images, times in (
        ("training step", step, options.images, 20),
        ("inference", inference, EVAL_BATCH, 10),
    ):
        for name in networks:
            seconds(work, name, 3)
        best = dict.fromkeys(networks, float("inf"))
        for _ in range(options.rounds):
            for name in networks:
                best[name] = min(best[name], seconds(work, name, times if device.type == "cuda" else 1))
        print(
            f"{what}: {best['inside'] * 1e3:.2f} ms inside, {best['behind'] * 1e3:.2f} ms behind, ratio "
            f"{best['behind'] / best['inside']:.2f}; {images / best['inside']:.0f} images/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
