"""Uniform risk minimisation: features that a discriminator cannot tell from uniform noise."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import log_uniform, one_of, uniform

WIDTH = 100  # width of the discriminator's hidden layers
# Activations of the features, and the smallest value of the noise. The largest is 1.
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "tanh": (torch.tanh, -1.0),
    "relu": (torch.relu, 0.0),
    "sigmoid": (torch.sigmoid, 0.0),
}


class URM(Algorithm):
    """network:       minimise CE(g(z), y) + urm_adv_lambda BCE(h(z), 1),   z = urm_generator_output(f(x))
    discriminator: minimise BCE(h(u), 1) + urm_adv_lambda BCE(h(z), 0)

    u is noise of the shape of z, uniform in [-1, 1] for tanh, in [0, 1] for relu and sigmoid. The discriminator h is an
    MLP with leaky ReLUs; it steps after the network, on the same z. BCE is the mean binary cross entropy. Both have an
    Adam; the discriminator's has the rate urm_discriminator_lr."""

    title = "features that a discriminator cannot tell from uniform noise"
    paper = "Krishnamachari et al., TMLR 2024"
    trains_on_features = True
    search_space = {
        **COMMON,
        "urm_adv_lambda": (0.1, uniform(0.0, 0.2)),
        "urm_discriminator_hidden_layers": (1, one_of(1, 2, 3)),
        "urm_discriminator_lr": (5e-5, log_uniform(-6, -4.5, above=True)),
        "urm_generator_output": ("tanh", one_of("tanh", "relu", options=tuple(ACTIVATIONS))),
    }
    small_images = {"urm_discriminator_lr": (1e-3, log_uniform(-5.5, -3.5, above=True))}

    def build(self) -> None:
        self.activation, self.least_noise = ACTIVATIONS[self.hparams.urm_generator_output]
        hidden = [
            layer
            for _ in range(self.hparams.urm_discriminator_hidden_layers)
            for layer in (nn.Linear(WIDTH, WIDTH), nn.LeakyReLU())
        ]
        self.discriminator = nn.Sequential(
            nn.Linear(self.num_features, WIDTH), nn.LeakyReLU(), *hidden, nn.Linear(WIDTH, 1)
        )

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {
            "main": self.adam([self.featurizer, self.classifier]),
            "discriminator": self.adam([self.discriminator], lr="urm_discriminator_lr"),
        }

    def features(self, x: Tensor) -> Tensor:
        return self.activation(super().features(x))

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        self.begin_update(minibatches)
        x, y = join(minibatches)
        z = self.features(x)
        risk = self.cross_entropy(self.classifier(z), y)
        adversary = self.discriminate(z, 1.0)
        loss = risk + self.hparams.urm_adv_lambda * adversary
        self.step(loss, "main")

        z = z.detach()
        noise = torch.lerp(torch.full_like(z, self.least_noise), torch.ones_like(z), torch.rand_like(z))
        discriminator = self.discriminate(noise, 1.0) + self.hparams.urm_adv_lambda * self.discriminate(z, 0.0)
        self.step(discriminator, "discriminator")
        terms = {"loss": loss, "risk": risk, "adversary": adversary, "discriminator": discriminator}
        return {name: term.detach() for name, term in terms.items()}

    def discriminate(self, z: Tensor, target: float) -> Tensor:
        """Return the cross entropy of the discriminator if all samples belong to the target, 1 noise or 0 features."""
        logits = self.discriminator(z)
        return binary_cross_entropy_with_logits(logits, torch.full_like(logits, target))
