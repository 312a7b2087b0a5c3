"""Several models as one: the mean of their probabilities."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from aidgn.errors import AidgnError
from aidgn.inference.model import Model
from aidgn.inference.prediction import Outputs

SMALLEST = torch.finfo(torch.float32).tiny  # logarithms of smaller probabilities are those of this number


class Ensemble(Model):
    """Models whose probabilities are averaged, with the interface of `Model`.

    The logits of a prediction are the logarithms of the mean probabilities; the features are those of all members, one
    after the other. There are no warnings about unfamiliar images. Members may have different networks and
    algorithms; each prepares the pictures as its network expects.

    Args:
        members: Models with the same classes and image size, on one device.
    """

    def __init__(self, members: Sequence[Model]):
        first = members[0]
        for other in members[1:]:
            for name in ("classes", "image_size", "device"):
                mine, theirs = getattr(first, name), getattr(other, name)
                if mine != theirs:
                    raise AidgnError(
                        f"The models cannot be averaged, because their {name.replace('_', ' ')} differ: {mine} and "
                        f"{theirs}."
                    )
        super().__init__(
            first.network,
            f"mean of {', '.join(member.algorithm for member in members)}",
            first.classes,
            list(dict.fromkeys(domain for member in members for domain in member.domains)),
            first.image_size,
            first.device,
            false_alarms=first.false_alarms,
            preprocessing=first.preprocessing,
            training_folders=[folder for member in members for folder in member.training_folders],
        )
        self.members = list(members)
        self.batch_size = int(np.lcm.reduce([member.network.group_size for member in members]))
        self.batch_size *= max(min(member.batch_size for member in members) // self.batch_size, 1)
        for member in members:
            member.uploads = self.uploads  # the caller waits for this stream before it overwrites the pixels

    @torch.no_grad()
    def launch(self, pixels: Sequence[np.ndarray]) -> Callable[[], Outputs]:
        """Queue decoded images for every member; return a function that waits for the outputs."""
        queued = [member.launch(pixels) for member in self.members]

        def wait() -> Outputs:
            outputs = [wait_for_member() for wait_for_member in queued]
            pairs = zip(self.members, outputs, strict=True)
            probabilities = [torch.from_numpy(member.prediction(output).probabilities) for member, output in pairs]
            logits = torch.stack(probabilities).mean(0).clamp(min=SMALLEST).log().float()
            none = torch.zeros(len(logits), dtype=torch.float64)
            return Outputs(torch.cat([output.features for output in outputs], dim=1), logits, none, none)

        return wait
