"""Metrics against loops over single images and single groups."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, log_loss, recall_score
from torch import Tensor

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, Algorithm, create
from aidgn.data import load_dataset
from aidgn.data.cache import prepare
from aidgn.data.loader import DeviceImageStore
from aidgn.data.transforms import build_transforms
from aidgn.metrics import calibration_error
from aidgn.training.evaluation import CPU_BATCH, evaluate


@pytest.fixture(scope="module")
def images() -> DeviceImageStore:
    return DeviceImageStore(prepare(load_dataset("digits")), torch.device("cpu"))


def build(name: str, **hyper_parameters: object) -> Algorithm:
    """With biases that make a few classes likely, so that accuracies are neither 0 nor the same everywhere."""
    torch.manual_seed(5)
    network = backbones.create("small", in_channels=3 + ALGORITHMS[name].extra_channels)
    algorithm = create(name, network, 10, 3, **hyper_parameters).train()
    with torch.no_grad():
        for parameter in algorithm.classifier.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return algorithm


def pixels_of(images: DeviceImageStore, group: np.ndarray) -> Tensor:
    """The network's input by the definition: (pixel / 255 - mean) / deviation, channels first."""
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    data = images.decoded.dataset.pixels
    assert data is not None
    return torch.from_numpy(((data[group] / 255 - mean) / deviation).transpose(0, 3, 1, 2)).float()


def expected(predict: Callable[[Tensor], Tensor], images: DeviceImageStore, groups: list[np.ndarray]) -> np.ndarray:
    """Accuracy and mean cross entropy of every group, sample by sample in float64; [2, groups]."""
    results = []
    for group in groups:
        right, loss = 0, 0.0
        labels = images.decoded.dataset.labels[group].tolist()
        for row, label in zip(predict(pixels_of(images, group)).double().tolist(), labels, strict=True):
            right += row.index(max(row)) == label
            loss -= row[label] - max(row) - math.log(sum(math.exp(value - max(row)) for value in row))
        results.append((right / len(group), loss / len(group)))
    return np.array(results).T


def groups_of(sizes: tuple[int, ...]) -> list[np.ndarray]:
    order = np.random.default_rng(0).permutation(1797)
    return np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])


def check(
    algorithm: Algorithm, images: DeviceImageStore, sizes: tuple[int, ...], predict: Callable[[Tensor], Tensor]
) -> None:
    groups = groups_of(sizes)
    _, clean = build_transforms(28, False, images.exact_fit)
    found = evaluate(algorithm, images, groups, clean)
    assert algorithm.training  # as it was
    algorithm.eval()
    with torch.no_grad():
        wanted = expected(predict, images, groups)
    accuracies = [scores.accuracy for scores in found]
    np.testing.assert_array_equal(accuracies, wanted[0])
    np.testing.assert_allclose([scores.nll for scores in found], wanted[1], rtol=1e-5)
    assert len({*accuracies}) > 1 and max(accuracies) > 0


def test_scores_are_those_of_the_logits(images: DeviceImageStore) -> None:
    """The metrics of a group are scikit-learn's of the predictions for its images, whatever shares a batch."""
    algorithm = build("ERM")
    groups = groups_of((31, 150, 70))
    _, clean = build_transforms(28, False, images.exact_fit)
    found = evaluate(algorithm, images, groups, clean)
    for group, scores in zip(groups, found, strict=True):
        labels = images.decoded.dataset.labels[group]
        with torch.no_grad():
            probabilities = algorithm.eval().predict(pixels_of(images, group)).double().softmax(1).numpy()
        predicted = probabilities.argmax(1)
        assert scores.macro_f1 == pytest.approx(f1_score(labels, predicted, average="macro", labels=np.unique(labels)))
        assert scores.nll == pytest.approx(log_loss(labels, probabilities, labels=range(10)), rel=1e-5)
        recalls = recall_score(labels, predicted, average=None, labels=range(10), zero_division=np.nan)
        np.testing.assert_allclose(np.array(scores.class_accuracies, float), recalls)
        assert scores.ece == pytest.approx(calibration_error(probabilities.max(1), predicted == labels), abs=1e-6)


def test_single_images(images: DeviceImageStore) -> None:
    """Groups that share batches, one of a single image, one longer than a batch."""
    algorithm = build("ERM", resnet_dropout=0.5)
    check(algorithm, images, (31, 1, 150, 64, 7), lambda x: torch.cat([algorithm.predict(each[None]) for each in x]))


@pytest.mark.parametrize(
    ("name", "given", "together"),
    [("ARM", {"batch_size": 8}, 8), ("ARM", {"batch_size": 7}, 7), ("ARM", {"batch_size": 70}, 70), ("MTL", {}, 64)],
)
def test_images_that_are_predicted_together_are_of_one_group(
    images: DeviceImageStore, name: str, given: dict[str, int], together: int
) -> None:
    """Consecutive images of one group, `together` at a time from its first; never of two groups, whatever the batch."""
    algorithm = build(name, **given)
    assert algorithm.group_size == together and CPU_BATCH == 64
    sizes = (5, 75, 1, 71) if name == "ARM" else (31, 65, 1, 150, 64)
    apart = lambda x: torch.cat([algorithm.predict(part) for part in x.split(together)])  # noqa: E731
    check(algorithm, images, sizes, apart)
    with torch.no_grad():  # and it matters: other neighbours, other logits
        x = pixels_of(images, groups_of(sizes)[1])
        assert not torch.allclose(algorithm.predict(x)[:4], algorithm.predict(x[:4]), rtol=1e-3)
