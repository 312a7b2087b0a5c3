"""The base class of all algorithms."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from aidgn.algorithms import checks
from aidgn.algorithms.batches import Minibatches, domain_ids, join, paired, random_cycle, split
from aidgn.algorithms.optimization import Optimization, backward_in_parts
from aidgn.algorithms.search_space import (
    COMMON,
    COMMON_SMALL,
    SearchSpace,
    Value,
    adapt_space,
    resolve,
    sample_space,
)
from aidgn.errors import AidgnError, plural

__all__ = [
    "COMMON",
    "COMMON_SMALL",
    "Algorithm",
    "Minibatches",
    "domain_ids",
    "join",
    "paired",
    "random_cycle",
    "split",
]


class Algorithm(nn.Module):
    """An objective over one batch per source domain, with the networks and optimizers that it trains.

    A subclass gives its hyper-parameters in `search_space` and its objective in `objective`. It may override `build`
    for auxiliary networks and buffers, `build_classifier`, `build_optimizers`, and `update` if an update takes several
    steps. Inside, `self.hparams.NAME` is a hyper-parameter, `self.featurizer` and `self.classifier` are the networks.

    The contract, which lets runs continue after an interruption and keeps GPUs busy:

    - State that an update changes is a parameter, a buffer, an optimizer in `optimizers`, or `updates`, the number of
      updates so far. Anything else is lost when a run is interrupted.
    - Random numbers come from PyTorch's, NumPy's or Python's global generators, whose state is saved.
    - Neither `objective` nor `update` calls `.item()` or moves tensors to the CPU: the GPU would wait at every step.

    Args:
        featurizer: Maps images to features [B, `num_features`].
        num_classes: Number of classes.
        num_domains: Number of source domains.
        **hyper_parameters: Values for names in `search_space`; the others take their defaults.
    """

    display_name: ClassVar[str]  # name in records and tables, if it is not the name of the class
    title: ClassVar[str] = "an algorithm of your own"  # one line for lists
    paper: ClassVar[str] = "unpublished"  # authors, venue, year
    search_space: ClassVar[SearchSpace] = COMMON  # default and distribution by name, for images of 224 pixels
    small_images: ClassVar[SearchSpace] = {}  # entries that differ for images of 28 to 64 pixels
    min_domains: ClassVar[int] = 1  # source domains it needs
    min_batch: ClassVar[int] = 1  # samples per domain it needs
    trains_on_features: ClassVar[bool] = False  # whether it needs only features and logits, so that x may be features
    extra_channels: ClassVar[int] = 0  # input channels of the featurizer beyond those of the image
    mean_over_samples: ClassVar[bool] = False  # whether its loss is a mean over samples; subclasses do not inherit it
    weighs_classes: ClassVar[bool] = False  # whether a user's algorithm takes its loss from `self.cross_entropy`
    passes: ClassVar[float] = 1.0  # time of an update in forward and backward passes over the batch, for forecasts
    only_adam: ClassVar[bool] = False  # whether an update imitates steps of Adam with one learning rate
    lr_milestones: ClassVar[bool] = False  # whether the paper's learning-rate milestones belong to the algorithm

    def __init__(self, featurizer: nn.Module, num_classes: int, num_domains: int, **hyper_parameters: Any):
        super().__init__()
        if num_domains < self.min_domains:
            raise AidgnError(
                f"{self.name()} needs at least {plural(self.min_domains, 'source domain')}, not {num_domains}."
            )
        self.hyper_parameters = resolve(self.name(), self.search_space, self.with_derived(hyper_parameters))
        self.hparams = SimpleNamespace(**self.hyper_parameters)
        if not hasattr(featurizer, "num_features"):
            raise AidgnError("The featurizer needs an attribute num_features, the length of its feature vectors.")
        self.num_features = int(featurizer.num_features)  # type: ignore[arg-type]
        self.num_classes = num_classes
        self.num_domains = num_domains
        self.featurizer = featurizer
        self.dropout = nn.Dropout(self.hparams.resnet_dropout)
        self.classifier = self.build_classifier()
        self.build()
        self.updates = 0
        self.lr_factor = 1.0
        self.optimization = Optimization()
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", None, persistent=False)

    # For subclasses to override --------------------------------------------------------------------------------------

    def build_classifier(self) -> nn.Module:
        """Create the classifier, from features to logits."""
        return nn.Linear(self.num_features, self.num_classes)

    def build(self) -> None:
        """Create auxiliary networks and register buffers. Networks that train also belong in `build_optimizers`."""

    def build_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Create the optimizers by name; `self.adam` makes one."""
        return {"main": self.adam([self.featurizer, self.classifier])}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        """Compute the objective before an update.

        Args:
            minibatches: One (x, y) per source domain.

        Returns:
            Scalar tensors by name. `loss` is minimised and needs a gradient; records show the mean of every term.
        """
        raise NotImplementedError

    def update(self, minibatches: Minibatches) -> dict[str, Tensor]:
        """Make one step of every optimizer down the loss of `objective`.

        An override that makes several steps calls `begin_update` first, then `step` for each loss.

        Args:
            minibatches: One (x, y) per source domain.

        Returns:
            Scalars by name, without gradients, `loss` among them.
        """
        self.begin_update(minibatches)
        if self.optimization.parts > 1:
            terms = backward_in_parts(self.objective, self, minibatches, self.optimization.parts)
            self.apply_gradients(*self.optimizers)
            return terms
        terms = self.objective(minibatches)
        if self.updates == 1:
            checks.check_terms(self.name(), terms, "objective")
        self.step(terms["loss"], *self.optimizers)
        return {name: term.detach() for name, term in terms.items()}

    # For subclasses to call ------------------------------------------------------------------------------------------

    def features(self, x: Tensor) -> Tensor:
        """Compute the input of the classifier."""
        return self.dropout(self.featurizer(x))

    def predict(self, x: Tensor) -> Tensor:
        """Compute logits [B, num_classes]."""
        return self.classifier(self.features(x))

    def cross_entropy(self, logits: Tensor, y: Tensor, reduction: str = "mean") -> Tensor:
        """Compute PyTorch's cross entropy, but with class weights as the mean of the weighted losses."""
        if self.class_weights is None:
            return cross_entropy(logits, y, reduction=reduction)
        losses = cross_entropy(logits, y, self.class_weights.to(logits.dtype), reduction="none")
        return losses.mean() if reduction == "mean" else losses

    def risks(self, logits: Tensor, minibatches: Minibatches) -> Tensor:
        """Compute the mean cross entropy of each domain, from the logits of the joined batch."""
        losses = self.cross_entropy(logits, join(minibatches)[1], reduction="none")
        return torch.stack([domain_losses.mean() for domain_losses in split(losses, minibatches)])

    def forward_per_domain(self, network: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Tensor:
        """Apply `network` to batches that DomainBed passes one by one, and join the outputs.

        One joined pass is faster and gives the same outputs, except with batch norms that use the statistics of their
        batch. With such layers, every batch gets a pass.

        Args:
            network: Such as `self.features` or `self.predict`.
            batches: Images, a tensor per domain.
        """
        if self.live_batch_norms():
            return torch.cat([network(x) for x in batches])
        return network(torch.cat(list(batches)))

    def live_batch_norms(self) -> list[_BatchNorm]:
        """Return the layers that normalize by the statistics of their batch."""
        return [layer for layer in self.featurizer.modules() if isinstance(layer, _BatchNorm) and layer.training]

    @contextmanager
    def keep_statistics(self) -> Iterator[None]:
        """Restore the running statistics of batch norms at the end of the context."""
        buffers = [
            (buffer, buffer.clone()) for layer in self.live_batch_norms() for buffer in layer.buffers(recurse=False)
        ]
        yield
        for buffer, saved in buffers:
            buffer.copy_(saved)

    def adam(
        self,
        modules: Iterable[nn.Module],
        *,
        lr: str = "lr",
        weight_decay: str = "weight_decay",
        betas: tuple[float, float] = (0.9, 0.999),
    ) -> torch.optim.Optimizer:
        """Create Adam over the parameters of some modules, or AdamW if the run asks for it.

        Args:
            modules: Modules to train.
            lr: Name of the hyper-parameter with the learning rate.
            weight_decay: Name of the hyper-parameter with the weight decay.
            betas: Decay of the moments.
        """
        parameters = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
        parameters.sort(key=Tensor.numel, reverse=True)  # a kernel takes about 36 tensors; equal sizes fill the GPU
        rate = float(getattr(self.hparams, lr))
        decay = float(getattr(self.hparams, weight_decay))
        optimizer = self.optimization.create(self.featurizer, parameters, rate, decay, betas)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * self.lr_factor
        return optimizer

    @cached_property
    def optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """The optimizers by name, created lazily because inference needs none."""
        try:
            optimizers = self.build_optimizers()
        except AttributeError as error:  # nn.Module would turn it into "no attribute `optimizers`"
            raise RuntimeError(f"build_optimizers of {self.name()}: {error}") from error
        checks.check_optimizers(self.name(), optimizers, self.optimization.changes_optimizers)
        return optimizers

    def begin_update(self, minibatches: Minibatches) -> None:
        """Count an update; check the batches of the first one."""
        if self.updates == 0:
            checks.check_batches(self.name(), minibatches, self.num_domains, self.min_batch)
        self.updates += 1

    def step(self, loss: Tensor, *optimizers: str) -> None:
        """Make one step of the named optimizers down the gradient of `loss` alone.

        With several devices the gradients are summed in a hook before `optimizer.step()`, so that code which changes
        gradients belongs in such a hook too.
        """
        self.zero_grad()
        loss.backward()
        self.apply_gradients(*optimizers)

    def apply_gradients(self, *optimizers: str) -> None:
        """Make one step of the named optimizers down the gradients that parameters have."""
        if self.updates <= 1:
            checks.check_trained(self.name(), self, self.optimizers.values())
            checks.check_optimizer_names(self.name(), optimizers, self.optimizers)
        for name in optimizers:
            self.optimizers[name].step()
        self.zero_grad()  # gradients lie in the memory of CUDA graphs, where the next forward pass must find none

    # For the trainer -------------------------------------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        """Number of consecutive images that are predicted together; 1 if each is predicted alone."""
        return 1

    def scale_lr(self, factor: float) -> None:
        """Set every learning rate to `factor` times its initial value."""
        self.lr_factor = factor
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def training_state(self) -> dict[str, Any]:
        """Return everything that `update` depends on and changes, except the global random state."""
        return {
            "weights": self.state_dict(),
            "updates": self.updates,
            "lr_factor": self.lr_factor,
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
        }

    def load_training_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a `training_state`; ValueError if an optimizer had other parameters."""
        self.load_state_dict(state["weights"])
        self.updates = int(state["updates"])
        self.lr_factor = float(state["lr_factor"])
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state["optimizers"][name])
            checks.check_moments(name, optimizer)

    # Names and hyper-parameters ------------------------------------------------------------------------------------

    @classmethod
    def name(cls) -> str:
        """Return the name in records and tables."""
        return vars(cls).get("display_name", cls.__name__)  # a subclass does not inherit it

    @classmethod
    def with_derived(cls, hyper_parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the hyper-parameters of a user, with other hyper-parameters that follow from them."""
        return dict(hyper_parameters)

    @classmethod
    def space(cls, dataset: str, small: bool | None = None, head: bool = False) -> SearchSpace:
        """Return the search space on a data set.

        Args:
            dataset: Name of the data set.
            small: Whether the images are small and the network trains from scratch; None asks the data set.
            head: Whether only the head is trained, on the features of a frozen network.
        """
        return adapt_space(cls.search_space, cls.small_images, dataset, small, head)

    @classmethod
    def sample(
        cls, dataset: str, trial: int, draw: int, small: bool | None = None, head: bool = False
    ) -> dict[str, Value]:
        """Sample the hyper-parameters of one run of a random search. Other arguments are those of `space`.

        Args:
            trial: Number of the trial.
            draw: Number of the draw; 0 is the defaults.
        """
        space = cls.space(dataset, small, head)
        if draw == 0:
            return {name: default for name, (default, _) in space.items()}
        return sample_space(space, cls.name(), dataset, trial, draw)

    # Names of version 0.1.0, for algorithms in users' files ---------------------------------------------------------

    def number(self, name: str) -> float:
        """Return `self.hparams.NAME` as a float."""
        return float(self.hyper_parameters[name])  # type: ignore[arg-type]

    def integer(self, name: str) -> int:
        """Return `self.hparams.NAME` as an int."""
        return int(self.hyper_parameters[name])  # type: ignore[arg-type]

    def descend(self, loss: Tensor, *optimizers: str) -> None:
        """Call `step`."""
        self.step(loss, *optimizers)

    def apart(self, network: Callable[[Tensor], Tensor], batches: Sequence[Tensor]) -> Tensor:
        """Call `forward_per_domain`."""
        return self.forward_per_domain(network, batches)

    def check(self, minibatches: Minibatches) -> None:
        """Check the batches; `begin_update` does so and counts the update."""
        checks.check_batches(self.name(), minibatches, self.num_domains, self.min_batch)
