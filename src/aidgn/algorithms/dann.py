"""Domain-adversarial training: features from which a discriminator cannot tell the domain."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, domain_ids, join
from aidgn.algorithms.search_space import RATE, SMALL_RATE, fixed, floor_power, log_uniform, one_of


class DANN(Algorithm):
    """discriminator: minimise D = CE(h(f(x)), domain) + grad_penalty mean |d sum CE / d f(x)|^2
    network:       minimise CE(g(f(x)), y) - dann_lambda D

    Update t = 1, 2 .. is the discriminator's where t mod (1 + d_steps_per_g_step) < d_steps_per_g_step. h is an MLP of
    mlp_depth linear layers, with dropout and ReLU between. Network and discriminator have an Adam each, with betas
    (beta1, 0.9) and rates lr_g and lr_d. If only lr and weight_decay are given, lr_g and lr_d are lr, and
    weight_decay_g is weight_decay."""

    title = "features from which a discriminator cannot tell the domain"
    paper = "Ganin et al., JMLR 2016"
    trains_on_features = True
    min_domains = 2
    search_space = {
        **COMMON,
        "dann_lambda": (1.0, log_uniform(-2, 2)),
        "d_steps_per_g_step": (1, floor_power(2, 0, 3, least=1)),
        "grad_penalty": (0.0, log_uniform(-2, 1)),
        "beta1": (0.5, one_of(0.0, 0.5, most=1.0, below=True)),
        "mlp_width": (256, floor_power(2, 6, 10, least=1)),
        "mlp_depth": (3, one_of(3, 4, 5, least=1)),
        "mlp_dropout": (0.0, one_of(0.0, 0.1, 0.5, most=1.0, below=True)),
        "lr_g": (5e-5, RATE),
        "lr_d": (5e-5, RATE),
        "weight_decay_g": (0.0, log_uniform(-6, -2)),
        "weight_decay_d": (0.0, log_uniform(-6, -2)),
    }
    small_images = {
        "lr_g": (1e-3, SMALL_RATE),
        "lr_d": (1e-3, SMALL_RATE),
        "weight_decay_g": (0.0, fixed(0.0)),
    }

    @classmethod
    def with_derived(cls, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
        sources = {"lr_g": "lr", "lr_d": "lr", "weight_decay_g": "weight_decay"}
        derived = {name: hyper_parameters[source] for name, source in sources.items() if source in hyper_parameters}
        return {**derived, **hyper_parameters}

    def build(self) -> None:
        widths = [self.num_features] + [self.hparams.mlp_width] * (self.hparams.mlp_depth - 1)
        hidden = [
            layer
            for n, m in pairwise(widths)
            for layer in (nn.Linear(n, m), nn.Dropout(self.hparams.mlp_dropout), nn.ReLU())
        ]
        self.discriminator = nn.Sequential(*hidden, nn.Linear(widths[-1], self.num_domains))

    def discriminator_parts(self) -> list[nn.Module]:
        """Return the modules that the discriminator trains."""
        return [self.discriminator]

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        betas = (self.hparams.beta1, 0.9)
        return {
            "main": self.adam(
                [self.featurizer, self.classifier], lr="lr_g", weight_decay="weight_decay_g", betas=betas
            ),
            "discriminator": self.adam(
                self.discriminator_parts(), lr="lr_d", weight_decay="weight_decay_d", betas=betas
            ),
        }

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        x, y = join(minibatches)
        domains = domain_ids(minibatches)
        steps = self.hparams.d_steps_per_g_step
        if self.updates % (1 + steps) < steps:
            with torch.no_grad():
                z = self.features(x)
            loss = self.discriminator_loss(z, y, domains)
            self.step(loss, "discriminator")
            return {"loss": loss.detach(), "discriminator": loss.detach()}
        z = self.features(x)
        classification = self.cross_entropy(self.classifier(z), y)
        discriminator = self.discriminator_loss(z, y, domains)
        loss = classification - self.hparams.dann_lambda * discriminator
        self.step(loss, "main")
        return {
            "loss": loss.detach(),
            "classification": classification.detach(),
            "discriminator": discriminator.detach(),
        }

    def discriminator_loss(self, z: Tensor, y: Tensor, domains: Tensor) -> Tensor:
        inputs = self.discriminator_input(z.requires_grad_(), y)  # for the penalty, also where no network made z
        losses = cross_entropy(self.discriminator(inputs), domains, reduction="none")
        loss = self.reduce(losses, y)
        if self.hparams.grad_penalty > 0:
            (gradient,) = torch.autograd.grad(losses.sum(), inputs, create_graph=True)
            loss = loss + self.hparams.grad_penalty * gradient.square().sum(1).mean()
        return loss

    def discriminator_input(self, z: Tensor, y: Tensor) -> Tensor:
        """Return the input of the discriminator."""
        return z

    def reduce(self, losses: Tensor, y: Tensor) -> Tensor:
        """Average the discriminator's cross entropy over samples."""
        return losses.mean()
