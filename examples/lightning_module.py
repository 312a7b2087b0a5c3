"""Train with the AIDGN loss in a Lightning module, on the embedded digits.

`python examples/lightning_module.py --unseen chalk --epochs 20`
"""

import argparse

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from aidgn.data import load_dataset
from aidgn.objective import AngularClassifier, aidgn_loss

Batch = tuple[Tensor, Tensor, Tensor]


class AngularInvariance(lightning.LightningModule):
    """A network followed by the angular classifier."""

    def __init__(
        self,
        network: nn.Module,
        num_features: int,
        num_classes: int,
        lr: float = 2e-3,
        kappa: float = 10,
        mu_star: float = 8,
    ):
        super().__init__()
        self.network, self.classifier = network, AngularClassifier(num_features, num_classes, kappa)
        self.lr, self.kappa, self.mu_star = lr, kappa, mu_star

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.network(x))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        x, labels, domains = batch
        loss = aidgn_loss(
            self.network(x), labels, domains, self.classifier.weight, kappa=self.kappa, mu_star=self.mu_star
        )
        self.log_dict({"classification": loss.classification, "regularizer": loss.regularizer})
        return loss.total

    def test_step(self, batch: Batch, _: int) -> None:
        x, labels, _ = batch
        self.log("accuracy on the unseen domain", (self(x).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unseen", default="chalk", help="ink, chalk, poster or outline")
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    digits = load_dataset("digits")
    x = torch.from_numpy(digits.pixels).permute(0, 3, 1, 2) / 255
    labels, domains = torch.from_numpy(digits.labels), torch.from_numpy(digits.domain_of)
    unseen = domains == digits.find_domain(options.unseen)
    training = TensorDataset(x[~unseen], labels[~unseen], domains[~unseen])
    test = TensorDataset(x[unseen], labels[unseen], domains[unseen])

    network = nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, 64),
    )
    trainer = lightning.Trainer(
        max_epochs=options.epochs, accelerator="auto", logger=False, enable_checkpointing=False, log_every_n_steps=1
    )
    module = AngularInvariance(network, num_features=64, num_classes=len(digits.classes))
    trainer.fit(module, DataLoader(training, batch_size=96, shuffle=True, drop_last=True))
    trainer.test(module, DataLoader(test, batch_size=512))


if __name__ == "__main__":
    main()
