"""Fine-tune a timm network with the AIDGN loss on your own pictures photos/<domain>/<class>/<image>.

`python examples/timm_finetune.py photos/ --unseen hospital_c --model resnet50.tv_in1k --pretrained`

Transforms, optimiser and schedule are timm's.
"""

import argparse
from pathlib import Path

import timm
import torch
from timm.data import create_transform, resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch.utils.data import ConcatDataset, DataLoader, StackDataset
from torchvision.datasets import ImageFolder

from aidgn.objective import AngularClassifier, aidgn_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--unseen", required=True, help="the domain for the test")
    parser.add_argument("--model", default="resnet50.tv_in1k")
    parser.add_argument("--pretrained", action="store_true", help="start from timm's weights")
    parser.add_argument("--size", type=int, help="pixels per side  [default: the model's]")
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=5e-5)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model(options.model, pretrained=options.pretrained, num_classes=0).to(
        device
    )  # 0: return features
    config = resolve_data_config({"input_size": (3, options.size, options.size)} if options.size else {}, model=model)
    augmented = create_transform(**config, is_training=True, scale=(0.7, 1.0), auto_augment=None)
    sources = sorted(path for path in options.folder.glob("[!.]*/") if path.name != options.unseen)
    images = [ImageFolder(path, augmented) for path in sources]
    domains = torch.cat([torch.full((len(folder),), number) for number, folder in enumerate(images)])
    training = DataLoader(
        StackDataset(ConcatDataset(images), domains), options.batch_size, shuffle=True, drop_last=True
    )
    unseen = ImageFolder(options.folder / options.unseen, create_transform(**config))
    if any(folder.classes != unseen.classes for folder in images):
        raise SystemExit("Labels are numbers of class folders: every domain needs the same folders.")

    classifier = AngularClassifier(model.num_features, len(unseen.classes)).to(device)
    optimizer = create_optimizer_v2(torch.nn.ModuleList([model, classifier]), opt="adam", lr=options.lr)
    schedule = CosineLRScheduler(optimizer, t_initial=options.epochs)
    for epoch in range(options.epochs):
        model.train()
        for (x, y), domain in training:
            x, y, domain = x.to(device), y.to(device), domain.to(device)
            loss = aidgn_loss(model(x), y, domain, classifier.weight)
            optimizer.zero_grad()
            loss.total.backward()
            optimizer.step()
        schedule.step(epoch + 1)
        model.eval()
        with torch.no_grad():
            correct = sum(
                int((classifier(model(x.to(device))).argmax(1).cpu() == y).sum())
                for x, y in DataLoader(unseen, options.batch_size)
            )
        print(f"epoch {epoch + 1}: loss {loss.total:.3f}, accuracy on {options.unseen} {correct / len(unseen):.1%}")


if __name__ == "__main__":
    main()
