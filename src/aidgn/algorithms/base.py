"""What every algorithm is: an objective over one batch per source domain, and the one form they all take."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from aidgn.algorithms.search_space import (
    SearchSpace,
    Value,
    draw_all,
    fixed,
    floor_power,
    log_uniform,
    one_of,
    resolve,
)
from aidgn.data.registry import DATASETS, SMALL_SIDE
from aidgn.errors import AidgnError, plural
from aidgn.objective import AngularClassifier

Minibatches = Sequence[tuple[Tensor, Tensor]]

RATE = log_uniform(-5, -3.5, above=True)
SMALL_RATE = log_uniform(-4.5, -2.5, above=True)
COMMON: SearchSpace = {
    "lr": (5e-5, RATE),
    "batch_size": (32, floor_power(2, 3, 5.5, least=1)),
    "weight_decay": (0.0, log_uniform(-6, -2)),
    "resnet_dropout": (0.0, one_of(0.0, 0.1, 0.5, most=1.0, below=True)),
}
COMMON_SMALL: SearchSpace = {  # DomainBed's
    "lr": (1e-3, SMALL_RATE),
    "batch_size": (64, floor_power(2, 3, 9, least=1)),
    "weight_decay": (0.0, fixed(0.0)),
    "resnet_dropout": (0.0, fixed(0.0, most=1.0, below=True)),  # these networks have none
}


class Algorithm(nn.Module):
    """An objective over one batch per source domain, with the parts that it trains.

    A subclass gives its hyper-parameters and `objective`; one with several steps per update overrides `update` and
    `build_optimizers`. Everything that must survive an interruption is a parameter, a buffer, an optimiser in
    `optimizers`, or `updates`, the number of updates done.
    """

    called: ClassVar[str]  # in records and tables, where that is not the name of the class
    title: ClassVar[str] = "an algorithm of your own"  # one line: what it does
    paper: ClassVar[str] = "unpublished"  # who, where, year
    search_space: ClassVar[SearchSpace] = COMMON  # name -> (default, distribution), 224-pixel images
    small_images: ClassVar[SearchSpace] = {}  # what differs for images of 28 to 64 pixels, as COMMON_SMALL from COMMON
    min_domains: ClassVar[int] = 1  # source domains it needs
    min_batch: ClassVar[int] = 1  # samples per domain it needs
    extra_channels: ClassVar[int] = 0  # input channels its featuriser must have beyond the image's
    lr_milestones: ClassVar[bool] = False  # whether the paper's learning-rate milestones are part of its recipe

    def __init__(self, featurizer: nn.Module, num_classes: int, num_domains: int, **hyper_parameters: Any):
        super().__init__()
        if num_domains < self.min_domains:
            raise AidgnError(
                f"{self.name()} needs at least {plural(self.min_domains, 'source domain')}, not {num_domains}."
            )
        self.hyper_parameters = resolve(self.name(), self.search_space, self.implied(hyper_parameters))
        if not hasattr(featurizer, "num_features"):
            raise AidgnError("The featurizer needs an attribute num_features: how many numbers it gives for an image.")
        self.num_features = int(featurizer.num_features)  # type: ignore[arg-type]
        self.num_classes = num_classes
        self.num_domains = num_domains
        self.featurizer = featurizer
        self.dropout = nn.Dropout(self.number("resnet_dropout"))
        self.classifier = self.build_classifier()
        self.build()
        self.updates = 0
        self.lr_factor = 1.0

    # What a subclass says ------------------------------------------------------------------------------------------

    def build_classifier(self) -> nn.Module:
        return nn.Linear(self.num_features, self.num_classes)

    def build(self) -> None:
        """Make auxiliary networks and buffers."""

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"main": self.adam([self.featurizer, self.classifier])}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        """The terms of the objective as scalars; `loss` is what the update minimises."""
        raise NotImplementedError

    # What it gets --------------------------------------------------------------------------------------------------

    @cached_property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Made when they are asked for: predicting needs none, and to import what they need takes a second."""
        try:
            made = self.build_optimizers()
        except AttributeError as error:  # nn.Module would say instead that there are no `optimizers`
            raise RuntimeError(f"build_optimizers of {self.name()}: {error}") from error
        if not (isinstance(made, dict) and all(isinstance(each, torch.optim.Optimizer) for each in made.values())):
            raise AidgnError(f"{self.name()}: `build_optimizers` must return a dict of optimisers by name, not {made}.")
        return made

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        """One step of every optimiser on one (x, y) per source domain; the terms of the objective before it."""
        self.check(minibatches)
        self.updates += 1
        terms = self.objective(minibatches)
        self.check_terms(terms, "objective")
        self.descend(terms["loss"], *self.optimizers)
        return {name: term.detach() for name, term in terms.items()}

    def features(self, x: Tensor) -> Tensor:
        """What the classifier sees of x."""
        return self.dropout(self.featurizer(x))

    def predict(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(self.features(x))

    def apart(self, network: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Tensor:
        """The joined output of `network`, our features or predict, for batches that DomainBed passes one by one. In one
        pass, as that is faster, unless batch norm with the statistics of what it gets tells the two apart."""
        if self.live_batch_norms():
            return torch.cat([network(x) for x in batches])
        return network(torch.cat(list(batches)))

    def live_batch_norms(self) -> list[_BatchNorm]:
        """The layers that normalise by the batch they get, and whose running statistics it changes."""
        return [layer for layer in self.featurizer.modules() if isinstance(layer, _BatchNorm) and layer.training]

    @property
    def group_size(self) -> int:
        """How many consecutive images are predicted together; 1: each on its own."""
        return 1

    def number(self, name: str) -> float:
        return float(self.hyper_parameters[name])  # type: ignore[arg-type]

    def integer(self, name: str) -> int:
        return int(self.hyper_parameters[name])  # type: ignore[arg-type]

    def adam(
        self,
        modules: Iterable[nn.Module],
        *,
        lr: str = "lr",
        weight_decay: str = "weight_decay",
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> torch.optim.Adam:
        """Adam over the parameters of `modules`, its rate and decay taken from the hyper-parameters of these names."""
        parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        parameters.sort(key=Tensor.numel, reverse=True)  # a GPU is given some 36 at a time; small ones leave it idle
        rate = self.number(lr)
        optimizer = torch.optim.Adam(
            parameters, lr=rate, weight_decay=self.number(weight_decay), betas=betas, fused=True
        )
        for group in optimizer.param_groups:
            group["initial_lr"] = rate
            group["lr"] = rate * self.lr_factor
        return optimizer

    def descend(self, loss: Tensor, *optimizers: str) -> None:
        """One step of the named optimisers down the gradient of `loss`, and of nothing that was computed before."""
        self.zero_grad()
        loss.backward()
        if self.updates == 1:
            self.check_trained()
        for name in optimizers:
            if name not in self.optimizers:
                raise AidgnError(
                    f"{self.name()}: `build_optimizers` gives no optimiser {name}; it has {', '.join(self.optimizers)}."
                )
            self.optimizers[name].step()
        self.zero_grad()  # gradients lie in the memory of CUDA graphs, where the next forward pass must find none

    def check(self, minibatches: Minibatches) -> None:
        if len(minibatches) != self.num_domains:
            raise AidgnError(
                f"{self.name()} was made for {self.num_domains} source domains and needs one batch of "
                f"each; got {len(minibatches)}."
            )
        smallest = min(len(y) for _, y in minibatches)
        if smallest < self.min_batch:
            raise AidgnError(
                f"{self.name()} needs at least {self.min_batch} samples per domain, got {smallest}: "
                "raise the batch size."
            )

    def check_trained(self) -> None:
        """That what has a gradient is trained: networks that a user's `build` makes are easily forgotten."""
        trained = {
            id(parameter)
            for optimizer in self.optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        left = [
            name
            for name, parameter in self.named_parameters()
            if parameter.grad is not None and id(parameter) not in trained
        ]
        if left:
            raise AidgnError(
                f"{self.name()}: the loss depends on {left[0]}, but no optimiser trains it. Put it into "
                "`build_optimizers`, or keep it as it is by `requires_grad_(False)`."
            )

    def check_terms(self, terms: object, method: str) -> None:
        """That an objective or update, which may be a user's, has given what it is to give."""
        if not isinstance(terms, Mapping) or "loss" not in terms:
            given = f"a dict of {list(terms)}" if isinstance(terms, Mapping) else type(terms).__name__
            raise AidgnError(
                f"{self.name()}: `{method}` must return a dict of scalar tensors with `loss` among them; "
                f"it gave {given}."
            )
        for name, term in terms.items():
            number = method == "update" and isinstance(term, int | float)
            if not number and (not isinstance(term, Tensor) or term.dim()):
                given = str(list(term.shape)) if isinstance(term, Tensor) else type(term).__name__
                raise AidgnError(f"{self.name()}: `{name}` of `{method}` must be a scalar tensor, not {given}.")
        if method == "objective" and not terms["loss"].requires_grad:
            raise AidgnError(
                f"{self.name()}: the loss of `objective` has no gradient: it was detached, or does not "
                "depend on the network."
            )

    # What the training loop does with it ---------------------------------------------------------------------------

    def scale_lr(self, factor: float) -> None:
        """Set every learning rate to `factor` times its initial value."""
        self.lr_factor = factor
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def training_state(self) -> dict[str, Any]:
        """All that `update` depends on and changes, apart from the global random state."""
        return {
            "weights": self.state_dict(),
            "updates": self.updates,
            "lr_factor": self.lr_factor,
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        self.load_state_dict(state["weights"])
        self.updates, self.lr_factor = int(state["updates"]), float(state["lr_factor"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            if isinstance(optimizer, torch.optim.Adam) and any(
                kept["exp_avg"].shape != parameter.shape for parameter, kept in optimizer.state.items() if kept
            ):
                raise ValueError(f"the optimiser {name} had other parameters, or in another order")

    # Hyper-parameters ----------------------------------------------------------------------------------------------

    @classmethod
    def name(cls) -> str:
        return vars(cls).get("called", cls.__name__)  # its own: what is made from it is another

    @classmethod
    def implied(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """`given` hyper-parameters and those that follow from them."""
        return dict(given)

    @classmethod
    def space(cls, dataset: str, small: bool | None = None) -> SearchSpace:
        """The search space on a data set: defaults for 224 pixels, or for small images trained from scratch."""
        if small is None:
            small = dataset in DATASETS and DATASETS[dataset].image_size <= SMALL_SIDE
        space = dict(cls.search_space)
        if small:
            space.update({key: value for key, value in COMMON_SMALL.items() if space[key] == COMMON[key]})
            space.update({key: value for key, value in cls.small_images.items() if key in space})
        if dataset == "DomainNet" and cls.search_space["batch_size"] == COMMON["batch_size"]:
            space["batch_size"] = (32, floor_power(2, 3, 5, least=1))
        return space

    @classmethod
    def sample(cls, dataset: str, trial: int, draw: int, small: bool | None = None) -> dict[str, Value]:
        """Hyper-parameters of one run of a random search; draw 0 is the defaults."""
        space = cls.space(dataset, small)
        if draw == 0:
            return {name: default for name, (default, _) in space.items()}
        return draw_all(space, cls.name(), dataset, trial, draw)


def join(minibatches: Minibatches) -> tuple[Tensor, Tensor]:
    """All domains in one batch, so that the network runs once."""
    return torch.cat([x for x, _ in minibatches]), torch.cat([y for _, y in minibatches])


def domain_ids(minibatches: Minibatches) -> Tensor:
    """The domain number of every sample of the joined batch."""
    return torch.cat([torch.full_like(y, domain) for domain, (_, y) in enumerate(minibatches)])


def split(joined: Tensor, minibatches: Minibatches) -> tuple[Tensor, ...]:
    """A tensor over the joined batch, cut per domain again."""
    return joined.split([len(y) for _, y in minibatches])


def risks(logits: Tensor, minibatches: Minibatches) -> Tensor:
    """CE_1 .. CE_N: the mean cross entropy of each domain, from the logits of the joined batch."""
    _, y = join(minibatches)
    return torch.stack([each.mean() for each in split(cross_entropy(logits, y, reduction="none"), minibatches)])


def paired(minibatches: Minibatches, i: int, j: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x_i, y_i, x_j, y_j of two domains, cut to the shorter batch."""
    (x_i, y_i), (x_j, y_j) = minibatches[i], minibatches[j]
    n = min(len(y_i), len(y_j))
    return x_i[:n], y_i[:n], x_j[:n], y_j[:n]


def class_vectors(classifier: nn.Module) -> Tensor | None:
    """[n, C]: the vector of each class, if the classifier is a single layer."""
    if isinstance(classifier, AngularClassifier):
        return classifier.weight.detach()
    return classifier.weight.detach().T if isinstance(classifier, nn.Linear) else None


def random_cycle(n: int) -> list[tuple[int, int]]:
    """The n pairs of neighbours of n domains put in a circle at random."""
    order = torch.randperm(n).tolist()
    return [(order[k], order[(k + 1) % n]) for k in range(n)]
