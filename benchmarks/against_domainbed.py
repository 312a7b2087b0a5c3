"""Compare every algorithm with DomainBed's class: are the weights equal after every update?

    git clone https://github.com/facebookresearch/DomainBed
    python benchmarks/against_domainbed.py DomainBed

Both sides get the same small network, initial weights, batches and random state; after every update all weights are
compared. In float64 an algorithm that does the same stays within rounding (1e-7, as DomainBed's CDANN computes in
float32 midway). Hyper-parameters are such that penalties get their weight midway. What docs/differences.md lists shows
here too, and is counted as expected. Fishr is left out: DomainBed's needs the package backpack, which gives nothing
under the PyTorch of today; the tests compare ours with a gradient per sample.
"""

import argparse
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from aidgn.algorithms import ALGORITHMS, create

CLASSES, DOMAINS, WIDTH, SIDE = 7, 3, 16, 8
EQUAL = 1e-7
# DomainBed's names, and values; ours are the same but for those in OURS.
GIVEN: dict[str, Any] = {
    "lr": 2e-3,
    "weight_decay": 1e-3,
    "batch_size": 8,
    "resnet_dropout": 0.0,
    "nonlinear_classifier": False,
    "irm_lambda": 100.0,
    "irm_penalty_anneal_iters": 12,
    "vrex_lambda": 10.0,
    "vrex_penalty_anneal_iters": 12,
    "mixup_alpha": 0.2,
    "groupdro_eta": 0.01,
    "mmd_gamma": 1.0,
    "mldg_beta": 1.0,
    "n_meta_test": 2,
    "mtl_ema": 0.99,
    "sag_w_adv": 0.1,
    "rsc_f_drop_factor": 1 / 3,
    "rsc_b_drop_factor": 1 / 3,
    "sd_reg": 0.1,
    "eqrm_quantile": 0.75,
    "eqrm_burnin_iters": 12,
    "eqrm_lr": 1e-4,
    "d_steps_per_g_step": 2,
    "grad_penalty": 0.5,
    "beta1": 0.5,
    "mlp_width": 16,
    "mlp_depth": 3,
    "mlp_dropout": 0.0,
    "lr_g": 2e-3,
    "lr_d": 3e-3,
    "weight_decay_g": 1e-3,
    "weight_decay_d": 1e-4,
    "lambda": 1.0,
    "meta_lr": 0.5,
    "urm_adv_lambda": 0.4,
    "urm_discriminator_hidden_layers": 2,
    "urm_discriminator_label_smoothing": 0,
    "urm_discriminator_lr": 3e-3,
    "urm_discriminator_optimizer": "adam",
    "urm_generator_output": "tanh",
}
OURS = {"lambda": "dann_lambda"}
# Where DomainBed keeps featuriser and classifier, if not under these names.
BODY = {"SagNet": ("network_f", "network_c"), "Fish": ("network.net.0", "network.net.1")}
# Parts other than featuriser and classifier, in DomainBed and here.
PARTS = {
    "SelfReg": [("cdpl", "projection")],
    "URM": [("discriminator", "discriminator")],
    "SagNet": [("network_s", "style_classifier")],
    "ARM": [("context_net", "context_net")],
    "DANN": [("discriminator", "discriminator")],
    "CDANN": [("discriminator", "discriminator"), ("class_embeddings", "class_embeddings")],
}
OTHER_DRAWS = {"MTL", "Fish"}  # DomainBed's Fish creates a network at every update, which draws its weights
# Where docs/differences.md says that they differ: always, or with uneven batches.
DIFFERENT = {("MTL", False), ("MTL", True), ("ARM", True)}


class Network(nn.Module):
    """A small network, with or without batch norm that learns."""

    def __init__(self, channels: int, norm: bool):
        super().__init__()
        norms = [nn.BatchNorm2d(6), nn.BatchNorm2d(WIDTH)] if norm else [nn.Identity(), nn.Identity()]
        self.body = nn.Sequential(
            nn.Conv2d(channels, 6, 3, padding=1),
            norms[0],
            nn.ReLU(),
            nn.Conv2d(6, WIDTH, 3, stride=2),
            norms[1],
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.num_features = self.n_outputs = WIDTH
        self.activation: nn.Module = nn.Identity()  # DomainBed's URM replaces it; ours applies its own

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.body(x))


class SelfRegPartners:
    """Draw SelfReg's two partners of an update together: DomainBed draws both for a class before the next class."""

    def __init__(self) -> None:
        self.second: Tensor | None = None

    def __call__(self, y: Tensor) -> Tensor:
        if self.second is not None:
            partners, self.second = self.second, None
            return partners
        first, self.second = torch.empty_like(y), torch.empty_like(y)
        for places in torch.sort(y).indices.split(torch.unique(y, return_counts=True)[1].tolist()):
            for partners in (first, self.second):
                partners[places] = places[torch.randperm(len(places))]
        return first


def load(folder: str) -> tuple[ModuleType, ModuleType]:
    """Import DomainBed's modules of algorithms and networks."""
    sys.path.insert(0, folder)
    for name in ("backpack", "backpack.extensions"):  # some versions import it, for Fishr alone
        stand_in = sys.modules[name] = ModuleType(name)
        stand_in.__dict__.update(backpack=None, extend=None, BatchGrad=None)
    from domainbed import algorithms, networks  # type: ignore[import-not-found]

    return algorithms, networks


def pair(
    name: str, theirs: ModuleType, networks: ModuleType, norm: bool
) -> tuple[nn.Module, nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """Return DomainBed's algorithm, ours with the same weights, and pairs of their corresponding parts."""
    networks.__dict__["Featurizer"] = lambda shape, hparams: Network(shape[0], norm)
    networks.__dict__["MNIST_CNN"] = Network  # URM accepts DomainBed's classes alone
    torch.manual_seed(0)
    one = getattr(theirs, name)((3, SIDE, SIDE), CLASSES, DOMAINS, dict(GIVEN))
    named = {OURS.get(key, key): value for key, value in GIVEN.items()}
    kind = ALGORITHMS[name]
    other = create(
        name,
        Network(3 + kind.extra_channels, norm),
        CLASSES,
        DOMAINS,
        **{key: value for key, value in named.items() if key in kind.search_space},
    )
    if name == "SelfReg":
        other.draw_partners = SelfRegPartners()  # ours draws them without waiting for a GPU
    names = ("featurizer", "classifier")
    parts = [
        (one.get_submodule(there), other.get_submodule(here))
        for there, here in [*zip(BODY.get(name, names), names, strict=True), *PARTS.get(name, [])]
    ]
    with torch.no_grad():
        for there, here in parts:
            for tensor, mine in zip(tensors(there), tensors(here), strict=True):
                mine.copy_(tensor)
    return one.train(), other.train(), parts


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def batches(steps: int, uneven: bool) -> Iterator[list[tuple[Tensor, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        sizes = ((8, 8, 8), (8, 5, 11), (4, 9, 6), (7, 8, 3))[1 + step % 3 if uneven else 0]
        labels = [
            torch.cat([torch.tensor([CLASSES - 1]), torch.randint(CLASSES, (n - 1,), generator=generator)])
            for n in sizes
        ]  # the last class in each: DomainBed's CDANN counts classes by the largest label
        yield [
            (torch.randn(len(y), 3, SIDE, SIDE, generator=generator) + 0.3 * domain + 0.2 * y.view(-1, 1, 1, 1), y)
            for domain, y in enumerate(labels)
        ]


def furthest(
    one: nn.Module, other: nn.Module, parts: list[tuple[nn.Module, nn.Module]], steps: int, uneven: bool
) -> tuple[float, float, bool]:
    """Update both; return the largest difference of weights, how far weights moved, and whether random draws agree."""
    start = [parameter.detach().clone() for there, _ in parts for parameter in there.parameters()]
    gap, same = 0.0, True
    for step, batch in enumerate(batches(steps, uneven)):
        states = []
        for algorithm in (one, other):
            torch.manual_seed(step)
            np.random.seed(step)
            algorithm.update([(x.clone(), y.clone()) for x, y in batch])  # type: ignore[operator]
            states.append((torch.get_rng_state().tolist(), np.random.get_state()[1].tolist()))  # type: ignore[index]
        same &= states[0] == states[1]
        gap = max(
            gap,
            *(
                float((mine - theirs).detach().abs().max())
                for there, here in parts
                for theirs, mine in zip(there.parameters(), here.parameters(), strict=True)
            ),
        )
    now = [parameter for there, _ in parts for parameter in there.parameters()]
    return gap, max(float((a - b).detach().abs().max()) for a, b in zip(start, now, strict=True)), same


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a checkout of DomainBed")
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()
    theirs, networks = load(arguments.folder)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)  # they are small
    wrong = []
    print(f"largest difference of any weight in {arguments.updates} updates, float64; moved: how far weights went")
    for name in ALGORITHMS:
        if not hasattr(theirs, name) or name == "Fishr":
            continue
        for norm in (False, True):
            for uneven in (False, True):
                gap, moved, same = furthest(*pair(name, theirs, networks, norm), arguments.updates, uneven)
                known = (name, uneven) in DIFFERENT
                verdict = "as documented" if known and gap > EQUAL else "equal" if gap <= EQUAL else "DIFFERENT"
                wrong += [name] * (verdict == "DIFFERENT" or not (same or name in OTHER_DRAWS))
                print(
                    f"{name:<13} {'batch norm' if norm else 'no norm':<10} {'uneven' if uneven else 'even':<6} "
                    f"{gap:.1e}, moved {moved:.2f}, random draws {'the same' if same else 'differ'}: {verdict}",
                    flush=True,
                )
    print(f"different: {', '.join(dict.fromkeys(wrong))}" if wrong else "no difference but those documented")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
