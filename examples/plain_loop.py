"""Train with the AIDGN loss in a plain PyTorch loop, on your own pictures photos/<domain>/<class>/<image>.

`python examples/plain_loop.py photos/ --unseen hospital_c --epochs 20`
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from aidgn.objective import AngularClassifier, aidgn_loss


class WithDomain(Dataset):
    """The images of one domain, with their labels and the number of the domain."""

    def __init__(self, folder: Path, domain: int, size: int):
        steps = [transforms.Resize((size, size)), transforms.ToTensor()]
        self.images, self.domain = ImageFolder(folder, transforms.Compose(steps)), domain

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        x, y = self.images[index]
        return x, y, self.domain


def network() -> nn.Sequential:
    """Build a network with 64 features; any network that returns a vector works."""
    return nn.Sequential(
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unseen", required=True, help="the domain for the test")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=32, help="pixels per side")
    options = parser.parse_args()

    torch.manual_seed(0)
    sources = sorted(path for path in options.folder.glob("[!.]*/") if path.name != options.unseen)
    domains = [
        WithDomain(path, number, options.size)
        for number, path in enumerate([*sources, options.folder / options.unseen])
    ]
    if any(domain.images.classes != domains[0].images.classes for domain in domains):
        raise SystemExit("Labels are numbers of class folders: every domain needs the same folders.")
    *training, test = domains

    featurizer = network()
    classifier = AngularClassifier(in_features=64, num_classes=len(test.images.classes), kappa=10)
    optimizer = torch.optim.Adam([*featurizer.parameters(), *classifier.parameters()], lr=2e-3)
    for epoch in range(options.epochs):
        featurizer.train()
        for x, y, domain in DataLoader(ConcatDataset(training), batch_size=32, shuffle=True):
            # mu_star: the mean norm of the features; about the square root of their number works.
            loss = aidgn_loss(featurizer(x), y, domain, classifier.weight, kappa=10, mu_star=8)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
        featurizer.eval()
        with torch.no_grad():
            correct = sum(int((classifier(featurizer(x)).argmax(1) == y).sum()) for x, y, _ in DataLoader(test, 256))
        print(f"epoch {epoch + 1}: loss {loss.total:.3f}, accuracy on {options.unseen} {correct / len(test):.1%}")


if __name__ == "__main__":
    main()
