"""The stream of batches, and what all four adaptations promise: the trained algorithm stays as it is, bit by bit."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from aidgn.adaptation import T3A, Tent, TentBN, TentC, batches
from aidgn.algorithms import ALGORITHMS
from aidgn.errors import AidgnError, ParameterError

METHODS = [T3A, TentC, TentBN, Tent]


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (0, []),
        (1, [1]),
        (2, [2]),
        (32, [32]),
        (33, [33]),
        (34, [32, 2]),
        (64, [32, 32]),
        (65, [32, 33]),
        (95, [32, 32, 31]),
    ],
)
def test_batches_of_32(n: int, sizes: list[int]) -> None:
    found = batches(n)
    assert [len(batch) for batch in found] == sizes
    assert [position for batch in found for position in batch] == list(range(n))


def test_batches_of_other_sizes() -> None:
    assert [list(batch) for batch in batches(5, 2)] == [[0, 1], [2, 3, 4]]
    assert [list(batch) for batch in batches(3, 1)] == [[0], [1], [2]]  # single images by wish
    assert torch.arange(10)[batches(10, 4)[1]].tolist() == [4, 5, 6, 7]
    with pytest.raises(AidgnError, match="at least 1 image"):
        batches(5, 0)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_trained_algorithm_stays_as_it_is(toy: SimpleNamespace, name: str, method: type[Any]) -> None:
    algorithm = toy.trained(name).eval()
    x = toy.images(11, seed=5, shift=0.5)
    state, prediction = copy.deepcopy(algorithm.state_dict()), algorithm.predict(x)
    trainable = [parameter.requires_grad for parameter in algorithm.parameters()]
    adaptation = method(algorithm)
    for batch in (x[:6], x[6:]):
        logits = adaptation.predict(batch)
        assert logits.shape == (len(batch), toy.CLASSES) and logits.dtype == torch.float64
        assert not logits.requires_grad and logits.isfinite().all()
    adaptation.reset()
    assert state.keys() == algorithm.state_dict().keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in algorithm.state_dict().items())
    assert torch.equal(algorithm.predict(x), prediction)
    assert all(parameter.grad is None for parameter in algorithm.parameters())
    assert [parameter.requires_grad for parameter in algorithm.parameters()] == trainable


@pytest.mark.parametrize("method", METHODS)
def test_training_mode_makes_no_difference_and_stays(toy: SimpleNamespace, method: type[Any]) -> None:
    """No dropout, no moving statistics, whatever mode the algorithm is in; a mixture of modes comes back too."""
    algorithm = toy.trained("ERM", frozen=False, resnet_dropout=0.5).eval()
    x = toy.images(8, seed=5)
    expected = [method(algorithm).predict(batch) for batch in (x[:5], x[5:])]
    algorithm.train()
    algorithm.featurizer[4].eval()
    modes = [module.training for module in algorithm.modules()]
    state = copy.deepcopy(algorithm.state_dict())
    with torch.no_grad():  # as evaluations run; to adapt needs gradients nevertheless
        found = [method(algorithm).predict(batch) for batch in (x[:5], x[5:])]
    assert all(map(torch.equal, found, expected))
    assert modes == [module.training for module in algorithm.modules()]
    assert all(torch.equal(tensor, state[key]) for key, tensor in algorithm.state_dict().items())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["ERM", "AIDGN"])
def test_reset_and_order(toy: SimpleNamespace, name: str, method: type[Any]) -> None:
    algorithm = toy.trained(name)
    adaptation = method(algorithm, **({} if method is T3A else {"rate": 10.0}))
    first, second = toy.images(9, seed=5), toy.images(7, seed=6, shift=0.3)
    a, b = adaptation.predict(first), adaptation.predict(second)
    adaptation.reset()
    fresh = adaptation.predict(second)  # another target: as if the first had never been
    assert torch.equal(fresh, method(algorithm, **({} if method is T3A else {"rate": 10.0})).predict(second))
    assert (fresh - b).abs().max() > 1e-4  # what came before matters
    adaptation.reset()
    assert torch.equal(adaptation.predict(first), a)  # what comes later does not
    adaptation.reset()
    order = torch.tensor([3, 1, 8, 0, 2, 7, 5, 4, 6])  # nor does the order inside a batch
    torch.testing.assert_close(adaptation.predict(first[order]), a[order], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(adaptation.predict(second), b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", [T3A, TentC, TentBN])
@pytest.mark.parametrize("name", ["ERM", "AIDGN", "MTL", "ARM"])
def test_features_computed_once_give_the_same(toy: SimpleNamespace, name: str, method: type[Any]) -> None:
    algorithm = toy.trained(name).eval()
    from_images, from_features = method(algorithm), method(algorithm)
    for batch in toy.images(12, seed=5).split(7):
        z = algorithm.features(batch)  # carries a gradient
        assert torch.equal(from_features.predict_features(z), from_images.predict(batch))


@pytest.mark.parametrize("method", METHODS)
def test_float32(toy: SimpleNamespace, method: type[Any]) -> None:
    double = toy.trained("AIDGN")
    single = copy.deepcopy(double).float()
    x = toy.images(8, seed=5)
    found = method(single).predict(x.float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), method(double).predict(x), rtol=1e-3, atol=1e-3)


def test_one_image(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM")
    x = toy.images(1)
    assert T3A(algorithm).predict(x).shape == (1, toy.CLASSES)
    assert torch.equal(TentC(algorithm).predict(x), algorithm.eval().predict(x))
    for method in (TentBN, Tent):
        with pytest.raises(AidgnError, match=f"{method.__name__} needs at least 2 images"):
            method(algorithm).predict(x)
    with pytest.raises(AidgnError, match="at least 1 images"):
        TentC(algorithm).predict(x[:0])


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (T3A, {"filter_k": 0}),
        (T3A, {"filter_k": -1}),
        (T3A, {"filter_k": 2.5}),
        (T3A, {"filter_k": "most"}),
        (TentC, {"rate": 0.0}),
        (TentBN, {"rate": -1.0}),
        (Tent, {"rate": float("nan")}),
        (TentC, {"updates": 0}),
        (TentBN, {"updates": -3}),
        (Tent, {"updates": 1.5}),
    ],
)
def test_ill_settings(toy: SimpleNamespace, method: type[Any], settings: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        method(toy.trained("ERM", updates=0), **settings)
    assert {caught.value.parameter} == settings.keys()


@pytest.mark.parametrize("method", METHODS)
def test_an_algorithm_without_classifier_is_refused(toy: SimpleNamespace, method: type[Any]) -> None:
    algorithm = toy.trained("ERM", updates=0)
    del algorithm.classifier
    with pytest.raises(AidgnError, match="ERM has no classifier"):
        method(algorithm)


def test_other_classifiers(toy: SimpleNamespace) -> None:
    algorithm = toy.trained("ERM", updates=0)
    algorithm.classifier = nn.Sequential(
        nn.Linear(toy.FEATURES, 3), nn.Dropout(0.9), nn.Linear(3, toy.CLASSES)
    ).double()
    with pytest.raises(AidgnError, match=r"one weight vector per class.* Sequential"):
        T3A(algorithm)
    x = toy.images(6)
    for method in (TentC, TentBN, Tent):
        assert torch.equal(method(algorithm).predict(x), method(algorithm).predict(x))  # no dropout
    assert torch.equal(TentC(algorithm).predict(x), algorithm.eval().predict(x))
