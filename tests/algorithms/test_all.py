"""What holds for every algorithm: it runs, continues where it was killed, and its hyper-parameters are in order."""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from aidgn.algorithms import ALGORITHMS, Algorithm, create
from aidgn.algorithms.base import domain_ids
from aidgn.algorithms.search_space import Distribution, uniform
from aidgn.errors import AidgnError
from aidgn.training.featurizer import Featurizer

NAMES = list(ALGORITHMS)


def build(toy: SimpleNamespace, name: str, **more: object) -> Algorithm:
    featurizer = toy.image_network(3 + ALGORITHMS[name].extra_channels)
    torch.manual_seed(3)
    return create(name, featurizer, toy.CLASSES, 3, **{"lr": 1e-2, **toy.BUSY.get(name, {}), **more}).train()


def batches(toy: SimpleNamespace, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x.float(), y) for x, y in toy.batches(step, shape=(3, 6, 6))]


def test_the_table() -> None:
    assert NAMES == [
        "ERM",
        "IRM",
        "GroupDRO",
        "Mixup",
        "MLDG",
        "CORAL",
        "MMD",
        "DANN",
        "CDANN",
        "MTL",
        "SagNet",
        "ARM",
        "VREx",
        "RSC",
        "AIDGN",
        "AIDGN-noR",
        "AIDGN-noD",
        "AIDGN-noRD",
        "AIDGN-release",
        "SD",
        "Fishr",
        "EQRM",
        "SAM",
        "SAGM",
        "AIDGN-SAGM",
        "MIRO",
        "SelfReg",
        "Fish",
        "URM",
        "CausIRL_CORAL",
        "CausIRL_MMD",
        "VNE",
        "AIDGN-VNE",
    ]
    for algorithm in ALGORITHMS.values():
        assert algorithm.title and algorithm.paper and algorithm.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_runs_in_float32(toy: SimpleNamespace, name: str) -> None:
    algorithm = build(toy, name, resnet_dropout=0.1)
    for step in range(3):
        terms = algorithm.update(batches(toy, step))
        assert all(torch.isfinite(value) and value.dtype == torch.float32 for value in terms.values())
    assert algorithm.updates == 3
    algorithm.eval()
    with torch.no_grad():
        x = torch.randn(9, 3, 6, 6)
        logits = algorithm.predict(x)
        assert logits.shape == (9, toy.CLASSES) and torch.isfinite(logits).all()
        torch.testing.assert_close(algorithm.classifier(algorithm.features(x)), logits)
        if algorithm.group_size == 1:  # the batch plays no part
            torch.testing.assert_close(torch.cat([algorithm.predict(part) for part in x.split(2)]), logits)


@pytest.mark.parametrize("name", NAMES)
def test_class_weights_scale_the_loss(toy: SimpleNamespace, name: str) -> None:
    """Weights that are all 1 change nothing, and other weights change the loss: no algorithm leaves them out."""
    losses = {}
    for key, weights in {"none": None, "ones": torch.ones(toy.CLASSES), "uneven": torch.arange(toy.CLASSES)}.items():
        algorithm = build(toy, name)
        algorithm.class_weights = weights
        toy.seed(0)
        losses[key] = [float(algorithm.update(batches(toy, step))["loss"]) for step in range(3)]
    assert losses["ones"] == pytest.approx(losses["none"], rel=1e-4)
    assert losses["uneven"] != pytest.approx(losses["none"], rel=1e-2)


@pytest.mark.parametrize("name", ["ERM", "AIDGN-noRD", "VREx"])
def test_class_weights_match_a_loop(toy: SimpleNamespace, name: str) -> None:
    """The classification loss is the mean over samples of the weight of the class times the loss of the sample."""
    weights = [0.5, 2.0, 0.25, 1.5]
    algorithm = toy.make(name, **({"gamma": 0.0} if name == "AIDGN-noRD" else {}))
    algorithm.class_weights = torch.tensor(weights)
    minibatches = toy.batches(0)
    losses = []
    for x, y in minibatches:
        rows = zip(algorithm.predict(x).detach(), y.tolist(), strict=True)
        losses.append([weights[c] * float(toy.cross_entropy(row[None], torch.tensor([c]))) for row, c in rows])
    terms = algorithm.objective(minibatches)
    if name == "VREx":
        assert float(terms["risk"]) == pytest.approx(np.mean([np.mean(domain) for domain in losses]))
    else:
        assert float(terms["loss"]) == pytest.approx(np.mean(np.concatenate(losses)))
    x, y = minibatches[0]
    shares = torch.nn.functional.one_hot(y, toy.CLASSES).double()
    assert algorithm.cross_entropy(algorithm.predict(x), shares, "none").tolist() == pytest.approx(losses[0])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_begin_and_end_with_an_update(toy: SimpleNamespace, name: str) -> None:
    """None is left behind, where CUDA graphs would stumble over it, and one that somebody left plays no part."""
    ends = []
    for leave in (False, True):
        algorithm = build(toy, name)
        for step in range(2):
            if leave:
                for parameter in algorithm.parameters():
                    parameter.grad = torch.ones_like(parameter)
            torch.manual_seed(step)
            np.random.seed(step)
            algorithm.update(batches(toy, step))
            assert all(parameter.grad is None for parameter in algorithm.parameters())
        ends.append(algorithm.state_dict())
    for key, value in ends[0].items():
        assert torch.equal(value, ends[1][key]), key


@pytest.mark.parametrize("cut", [2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_killed_and_continued_is_uninterrupted(toy: SimpleNamespace, name: str, cut: int, tmp_path: Path) -> None:
    """Around update 3, where IRM, VREx, Fishr and EQRM restart Adam, and with a learning rate that was scaled."""
    algorithm, states = build(toy, name), {}
    for step in range(6):
        if step == cut:
            torch.save(algorithm.training_state(), tmp_path / "state.pt")
        if step == 1:
            algorithm.scale_lr(0.5)
        toy.seed(step)
        algorithm.update(batches(toy, step))
    states = algorithm.training_state()

    continued = build(toy, name)
    continued.load_training_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert continued.updates == cut
    for step in range(cut, 6):
        toy.seed(step)
        continued.update(batches(toy, step))
    assert_identical(continued.training_state(), states)


def test_a_state_with_parameters_in_another_order_is_refused(toy: SimpleNamespace) -> None:
    algorithm = build(toy, "ERM")
    algorithm.update(batches(toy, 0))
    state = algorithm.training_state()
    kept = state["optimizers"]["main"]["state"]
    state["optimizers"]["main"]["state"] = dict(zip(kept, reversed(kept.values()), strict=True))
    with pytest.raises(ValueError, match="another order"):
        build(toy, "ERM").load_training_state(state)


def test_a_state_of_another_shape_than_its_parameter_is_kept(toy: SimpleNamespace) -> None:
    class Factored(ALGORITHMS["ERM"]):  # type: ignore[misc]
        def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            return {"main": torch.optim.Adafactor(self.parameters())}

    algorithm, continued = (Factored(toy.image_network(3), toy.CLASSES, 3) for _ in range(2))
    algorithm.update(batches(toy, 0))
    continued.load_training_state(algorithm.training_state())
    assert_identical(continued.training_state(), algorithm.training_state())


def assert_identical(a: object, b: object, where: str = "state") -> None:
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            assert_identical(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_identical(x, y, f"{where}[{k}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    else:
        assert a == b, where


@pytest.mark.parametrize(
    ("name", "passes"), [("ERM", [[True], [True]]), ("DANN", [[True], [False]]), ("SagNet", [[True, False, True]] * 2)]
)
def test_passes_without_training_keep_no_graph(toy: SimpleNamespace, name: str, passes: list[list[bool]]) -> None:
    algorithm, seen = build(toy, name), []
    algorithm.featurizer.register_forward_hook(lambda *call: seen.append(call[2].requires_grad))
    for step, expected in enumerate(passes):
        seen.clear()
        algorithm.update(batches(toy, step))
        assert seen == expected


@pytest.mark.parametrize("name", NAMES)
def test_frozen_featurizer_and_its_optimizer_state_wait(toy: SimpleNamespace, name: str) -> None:
    algorithm = build(toy, name, weight_decay=0.1)
    network = algorithm.featurizer
    algorithm.featurizer = Featurizer(network, "float32")
    algorithm.featurizer.frozen = True
    before, head = copy.deepcopy(network.state_dict()), copy.deepcopy(algorithm.classifier.state_dict())

    def moments() -> list[dict]:
        optimizer = algorithm.optimizers["main"]
        return [optimizer.state[weight] for weight in network.parameters() if optimizer.state[weight]]

    for step in range(4):
        algorithm.update(batches(toy, step))
    assert_identical(network.state_dict(), before)
    assert not moments()
    assert not torch.equal(next(iter(head.values())), next(iter(algorithm.classifier.state_dict().values())))
    algorithm.featurizer.frozen = False
    for step in range(4, 6):
        algorithm.update(batches(toy, step))
    assert not torch.equal(next(iter(before.values())), next(iter(network.state_dict().values())))
    steps = {float(state["step"]) for state in moments()}
    assert len(steps) == 1 and steps <= {1.0, 2.0, 4.0, 6.0}  # DANN steps every second time, SagNet twice, Fish thrice


def test_head_first_is_two_adams_one_after_the_other(toy: SimpleNamespace) -> None:
    algorithm = toy.make("ERM", Featurizer(toy.image_network(3), "float32"))
    network, classifier = copy.deepcopy(algorithm.featurizer.network), copy.deepcopy(algorithm.classifier)
    head = toy.Adam(classifier.parameters(), 1e-2, 1e-3)
    rest = toy.Adam(network.parameters(), 1e-2, 1e-3)
    for step in range(5):
        minibatches = toy.batches(step, shape=(3, 6, 6))
        algorithm.featurizer.frozen = step < 3
        algorithm.update(minibatches)
        loss = toy.cross_entropy(
            classifier(network(torch.cat([x for x, _ in minibatches]))), torch.cat([y for _, y in minibatches])
        )
        gradients = torch.autograd.grad(loss, [*head.parameters, *rest.parameters])
        head.step(gradients[: len(head.parameters)])
        if step >= 3:
            rest.step(gradients[len(head.parameters) :])
        toy.same_weights(algorithm.featurizer.network, network)
        toy.same_weights(algorithm.classifier, classifier)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("ERM", [12]),
        ("IRM", [12]),
        ("RSC", [12]),
        ("GroupDRO", [5, 3, 4]),
        ("CORAL", [5, 3, 4]),
        ("MMD", [5, 3, 4]),
        ("MTL", [5, 3, 4]),
        ("EQRM", [5, 3, 4]),
        ("CausIRL_CORAL", [5, 3, 4]),
        ("Mixup", [3, 3, 4]),
    ],
)
def test_what_batch_norm_gets(toy: SimpleNamespace, name: str, sizes: list[int]) -> None:
    """In training it gets the batches (Mixup: pairs) that DomainBed passes one by one, one by one; frozen, all."""
    norm, seen = torch.nn.BatchNorm1d(toy.FEATURES, momentum=0.25), []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    algorithm = toy.make(name, toy.Network(*toy.network(), norm))
    algorithm.update(toy.batches(0))
    assert (sorted if name == "Mixup" else list)([len(x) for x in seen]) == sizes
    expected = torch.zeros(toy.FEATURES, dtype=torch.float64)
    for x in seen:
        expected = 0.75 * expected + 0.25 * x.mean(0)
    torch.testing.assert_close(norm.running_mean, expected)
    norm.eval()
    algorithm.update(toy.batches(1))
    assert len(seen) == len(sizes) + 1 and len(seen[-1]) == sum(sizes)


@pytest.mark.parametrize("dataset", ["PACS", "DomainNet", "RotatedMNIST"])
@pytest.mark.parametrize("name", NAMES)
def test_hyper_parameters(name: str, dataset: str) -> None:
    algorithm = ALGORITHMS[name]
    space = algorithm.space(dataset)
    defaults = {key: default for key, (default, _) in space.items()}
    assert algorithm.sample(dataset, trial=1, draw=0) == defaults
    draws = [algorithm.sample(dataset, 0, k) for k in range(1, 30)]
    assert draws == [algorithm.sample(dataset, 0, k) for k in range(1, 30)]
    assert draws != [algorithm.sample(dataset, 1, k) for k in range(1, 30)]
    for values in (defaults, *draws):
        assert values.keys() == space.keys()
        for key, value in values.items():
            assert type(value) in (float, int, str, type(None))
            assert space[key][1].check(name, key, value) == value
            assert algorithm.search_space[key][1].check(name, key, value) == value


# name: (default, lowest and highest value of the search), as tabulated for DomainBed, and by AIDGN's authors.
RANGES = {
    ("IRM", "irm_lambda"): (100, 1e-1, 1e5),
    ("IRM", "irm_penalty_anneal_iters"): (500, 1, 1e4),
    ("GroupDRO", "groupdro_eta"): (0.01, 1e-3, 1e-1),
    ("Mixup", "mixup_alpha"): (0.2, 0.1, 10),
    ("MLDG", "mldg_beta"): (1, 0.1, 10),
    ("CORAL", "mmd_gamma"): (1, 0.1, 10),
    ("MMD", "mmd_gamma"): (1, 0.1, 10),
    ("DANN", "dann_lambda"): (1, 1e-2, 1e2),
    ("DANN", "d_steps_per_g_step"): (1, 1, 7),
    ("DANN", "grad_penalty"): (0, 1e-2, 10),
    ("DANN", "mlp_width"): (256, 64, 1023),
    ("DANN", "lr_g"): (5e-5, 1e-5, 10**-3.5),
    ("CDANN", "lr_d"): (5e-5, 1e-5, 10**-3.5),
    ("CDANN", "weight_decay_g"): (0, 1e-6, 1e-2),
    ("CDANN", "weight_decay_d"): (0, 1e-6, 1e-2),
    ("SagNet", "sag_w_adv"): (0.1, 1e-2, 10),
    ("VREx", "vrex_lambda"): (10, 1e-1, 1e5),
    ("VREx", "vrex_penalty_anneal_iters"): (500, 1, 1e4),
    ("RSC", "rsc_f_drop_factor"): (1 / 3, 0, 0.5),
    ("RSC", "rsc_b_drop_factor"): (1 / 3, 0, 0.5),
    ("SD", "sd_reg"): (0.1, 1e-5, 1e-1),
    ("Fishr", "fishr_lambda"): (1000, 10, 1e4),
    ("Fishr", "penalty_anneal_iters"): (1500, 0, 4999),
    ("Fishr", "ema"): (0.95, 0.9, 0.99),
    ("EQRM", "eqrm_quantile"): (0.75, 0.5, 0.99),
    ("EQRM", "eqrm_burnin_iters"): (2500, 10**2.5, 10**3.5),
    ("EQRM", "eqrm_lr"): (1e-6, 1e-7, 1e-5),
    ("CausIRL_CORAL", "mmd_gamma"): (1, 0.1, 10),
    ("CausIRL_MMD", "mmd_gamma"): (1, 0.1, 10),
    ("URM", "urm_adv_lambda"): (0.1, 0, 0.2),
    ("URM", "urm_discriminator_lr"): (5e-5, 1e-6, 10**-4.5),
    ("ERM", "lr"): (5e-5, 1e-5, 10**-3.5),
    ("ERM", "batch_size"): (32, 8, 45),
    ("ERM", "weight_decay"): (0, 1e-6, 1e-2),
    ("AIDGN", "beta"): (0.3, 0.05, 0.5),
    ("AIDGN", "eta"): (0.04, 0.02, 0.06),
    ("AIDGN-release", "eta"): (0.04, 10 / 410, 25 / 410),
    ("AIDGN-release", "ratio_threshold"): (1, 1, 3),
}
CHOICES = {
    ("MLDG", "n_meta_test"): (None, {1, 2}),
    ("DANN", "beta1"): (0.5, {0, 0.5}),
    ("DANN", "mlp_depth"): (3, {3, 4, 5}),
    ("CDANN", "mlp_dropout"): (0, {0, 0.1, 0.5}),
    ("MTL", "mtl_ema"): (0.99, {0.5, 0.9, 0.99, 1}),
    ("ERM", "resnet_dropout"): (0, {0, 0.1, 0.5}),
    ("SAM", "rho"): (0.05, {0.01, 0.02, 0.05, 0.1}),
    ("SAGM", "rho"): (0.05, {0.01, 0.02, 0.05, 0.1}),
    ("SAGM", "alpha"): (1e-3, {5e-4, 1e-3}),
    ("MIRO", "ld"): (0.1, {0.01, 0.1}),
    ("Fish", "meta_lr"): (0.5, {0.05, 0.1, 0.5}),
    ("URM", "urm_discriminator_hidden_layers"): (1, {1, 2, 3}),
    ("URM", "urm_generator_output"): ("tanh", {"tanh", "relu"}),
    ("VNE", "vne_coef"): (0.01, {-0.1, -0.01, 0.01, 0.1}),
    ("AIDGN", "lr"): (2.5e-5, {1e-5, 2.5e-5, 5e-5}),
    ("AIDGN-release", "lr"): (2.5e-5, {1.25e-5, 2.5e-5}),
}


@pytest.mark.parametrize(("name", "key"), [*RANGES, *CHOICES])
def test_search_distributions(name: str, key: str) -> None:
    default, distribution = ALGORITHMS[name].search_space[key]
    rng = np.random.default_rng(0)
    drawn = [distribution.sample(rng) for _ in range(400)]
    if (name, key) in CHOICES:
        assert (default, set(drawn)) == CHOICES[name, key]
        return
    expected, low, high = RANGES[name, key]
    assert default == expected
    assert low <= min(drawn) and max(drawn) <= high
    if high - low > 10 or low <= 0 or high / low < 3:  # the ends are reached: on the scale of the distribution
        assert min(drawn) < low + 0.02 * (high - low) + 1e-12
    if low > 0 and high / low > 3:
        assert math.log(min(drawn) / low) < 0.05 * math.log(high / low) + 0.3
        assert math.log(high / max(drawn)) < 0.05 * math.log(high / low) + 0.3


def test_small_images_and_domainnet() -> None:
    rng = np.random.default_rng(0)
    small, net = ALGORITHMS["ERM"].space("RotatedMNIST"), ALGORITHMS["ERM"].space("DomainNet")
    assert [small[key][0] for key in ("lr", "batch_size", "weight_decay")] == [1e-3, 64, 0.0]
    rates = [small["lr"][1].sample(rng) for _ in range(300)]
    assert 10**-4.5 <= min(rates) < 1e-4 and 2e-3 < max(rates) <= 10**-2.5
    sizes = [small["batch_size"][1].sample(rng) for _ in range(300)]
    assert 8 <= min(sizes) < 10 and 400 < max(sizes) <= 512
    assert {small[key][1].sample(rng) for key in ("weight_decay", "resnet_dropout") for _ in range(20)} == {0.0}
    assert 28 < max(net["batch_size"][1].sample(rng) for _ in range(300)) <= 32


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("ERM", {"lr": 0.0}),
        ("ERM", {"lr": float("nan")}),
        ("ERM", {"batch_size": 0}),
        ("ERM", {"batch_size": 1.5}),
        ("ERM", {"weight_decay": -1e-3}),
        ("ERM", {"resnet_dropout": 1.5}),
        ("IRM", {"irm_penalty_anneal_iters": -1}),
        ("IRM", {"irm_lambda": "much"}),
        ("Mixup", {"mixup_alpha": 0}),
        ("MLDG", {"n_meta_test": 0}),
        ("DANN", {"beta1": 1.0}),
        ("DANN", {"d_steps_per_g_step": 0}),
        ("CDANN", {"mlp_depth": 0}),
        ("MTL", {"mtl_ema": 1.1}),
        ("RSC", {"rsc_f_drop_factor": 1.2}),
        ("Fishr", {"ema": 1.0}),
        ("EQRM", {"eqrm_quantile": 1.0}),
        ("EQRM", {"eqrm_quantile": 0.0}),
        ("EQRM", {"eqrm_lr": 0.0}),
        ("SD", {"sd_reg": True}),
        ("Fish", {"meta_lr": 1.5}),
        ("URM", {"urm_generator_output": "identity"}),
    ],
)
def test_values_out_of_range(toy: SimpleNamespace, name: str, given: dict[str, object]) -> None:
    ((key, value),) = given.items()
    with pytest.raises(AidgnError, match=f"{name}: {key}={value}.*(expected|is not) "):
        create(name, toy.network(), 4, 3, **given)


def test_unknown_hyper_parameter_suggests_the_nearest(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="Did you mean mmd_gamma"):
        create("CORAL", toy.network(), 4, 3, mmd_gama=1.0)


def test_bounds_in_words() -> None:
    assert uniform(0, 1, most=1.0, above=True, below=True).expected() == "a number above 0 and below 1"
    assert Distribution("", lambda rng: None, kind=int, least=1, optional=True).expected() == (
        "a whole number of at least 1 or none"
    )


def test_as_many_batches_as_domains(toy: SimpleNamespace) -> None:
    with pytest.raises(AidgnError, match="made for 3 source domains"):
        toy.make("ERM").update(toy.batches(0)[:2])


def test_domain_ids(toy: SimpleNamespace) -> None:
    assert domain_ids(toy.batches(0)).tolist() == [0] * 5 + [1] * 3 + [2] * 4
