"""The table of adaptation methods. PyTorch is imported only when the class of a method is used."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Adapter(Protocol):
    """A trained algorithm that adapts, made by its class from the algorithm and one of the method's settings.

    The class of a method that adapts nothing below the features also has `predict_features`, which takes features in
    place of images.
    """

    def reset(self) -> None:
        """Forget all batches."""

    def predict(self, x: "Tensor") -> "Tensor":
        """Adapt to a batch of images and return its logits."""


@dataclass(frozen=True)
class AdaptationMethod:
    """A method of test-time adaptation."""

    name: str  # name in tables and in adaptation.jsonl
    title: str  # the adapted part, in a few words
    description: str  # the method in a sentence
    location: str  # module and class below `aidgn.adaptation`; the class is an `Adapter`
    settings: tuple[dict[str, Any], ...]  # settings to choose from by accuracy on source validation data
    needs_images: bool = False  # whether the method adapts the network below the features

    @property
    def adapter(self) -> Callable[..., Adapter]:
        """The class that adapts."""
        module, name = self.location.split(".")
        adapter: Callable[..., Adapter] = getattr(import_module(f"aidgn.adaptation.{module}"), name)
        return adapter


TENT_SETTINGS = tuple({"rate": rate, "updates": updates} for rate in (0.1, 1.0, 10.0) for updates in (1, 3))
METHODS = {
    method.name: method
    for method in (  # in the order of the paper's figure 3
        AdaptationMethod(
            "T3A",
            "class directions",
            "Classify by class directions that are averaged over the most certain features seen so far.",
            "t3a.T3A",
            tuple({"filter_k": k} for k in (1, 5, 20, 50, 100, "all")),
        ),
        AdaptationMethod(
            "Tent-BN",
            "a batch norm before the classifier",
            "Minimise the entropy of predictions over scale and shift of a batch norm before the classifier.",
            "tent.TentBN",
            TENT_SETTINGS,
        ),
        AdaptationMethod(
            "Tent-C",
            "the classifier",
            "Minimise the entropy of predictions over the classifier's parameters.",
            "tent.TentC",
            TENT_SETTINGS,
        ),
        AdaptationMethod(
            "Tent",
            "the backbone's batch norms",
            "Minimise the entropy of predictions over scales and shifts of the backbone's batch norms.",
            "tent.Tent",
            TENT_SETTINGS,
            needs_images=True,
        ),
    )
}
DEFAULT = tuple(name for name, method in METHODS.items() if not method.needs_images)
ORDER = ("none", *METHODS)  # of rows in a table: "none" is the algorithm as trained
