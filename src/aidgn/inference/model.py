"""Classify images with a trained network; images are prepared as in its evaluation."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from aidgn import backbones
from aidgn.algorithms import Algorithm
from aidgn.data.images import largest_slot
from aidgn.data.loader import to_device
from aidgn.data.transforms import clean
from aidgn.errors import AidgnError
from aidgn.inference.image_stream import ImageLike, OnBroken, Pixels, streamed
from aidgn.inference.prediction import Outputs, Prediction, softmax
from aidgn.new_site.confidence import DISTANCE, UNSURE
from aidgn.new_site.expectations import Expectations
from aidgn.new_site.monitor import SiteMonitor
from aidgn.novelty import FALSE_ALARM_RATE, MAX_NORM, Novelty, norms_and_angles, to_array
from aidgn.objective import class_vectors
from aidgn.training.evaluation import compute_outputs, eval_batch_size
from aidgn.trust import logit_scores, nearest_angles, negative_aware_norms


class Model:
    """A trained network with its classes, from `load_model`.

    An image is a path, a PIL image, an array [H, W, 3] or [H, W] of uint8, or a tensor [3, H, W] of uint8. Numbers with
    a fraction go from 0 to 1 and are rounded to 8 bits. Algorithms that describe a domain by neighbouring images (ARM,
    MTL) use consecutive images.
    """

    def __init__(
        self,
        network: Algorithm,
        algorithm: str,
        classes: list[str],
        domains: list[str],
        image_size: int,
        device: torch.device,
        novelty: Novelty | None = None,
        false_alarms: float = FALSE_ALARM_RATE,
        preprocessing: backbones.Preprocessing = backbones.IMAGENET,
        expectations: Expectations | None = None,
        training_folders: Sequence[Path] = (),
    ):
        self.network = network.to(device).eval()
        self.algorithm = algorithm
        self.classes = classes
        self.domains = domains
        self.image_size = image_size
        self.device = device
        self.novelty = novelty
        self.false_alarms = false_alarms
        self.preprocessing = preprocessing
        self.expectations = expectations
        self.training_folders = training_folders
        self.slot = largest_slot(image_size)  # larger images are shrunk to this side first, as in the cache
        self.batch_size = eval_batch_size(network, device)
        if device.type == "cuda":
            precision = getattr(network.featurizer, "precision", "float32")
            backbones.freeze_folded(network, torch.bfloat16 if precision == "bfloat16" else torch.float32)
        self.vectors = class_vectors(network.classifier) if novelty is None else novelty.weight
        if self.vectors is not None:
            self.vectors = torch.as_tensor(self.vectors).to(device)
        self.uploads = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.in_flight = 0 if self.uploads is None else 2  # batches queued on the GPU while results are read

    def predict(self, images: ImageLike | Iterable[ImageLike]) -> Prediction:
        """Predict labels and probabilities of one or many images."""
        parts = [outputs for _, outputs in self.compute_batches(as_list(images))]
        none = torch.empty(0, dtype=torch.float64)
        empty = Outputs(torch.empty(0, self.network.num_features), torch.empty(0, len(self.classes)), none, none)
        return self.prediction(Outputs(*(torch.cat(tensors) for tensors in zip(*(parts or [empty]), strict=True))))

    def logits(self, images: ImageLike | Iterable[ImageLike]) -> Tensor:
        """Return logits [N, C], float32 on the CPU."""
        return self.predict(images).logits

    def prediction(self, outputs: Outputs) -> Prediction:
        """Turn outputs of the network into a prediction."""
        probabilities = softmax(outputs.logits.numpy(), self.temperature)
        if not np.isfinite(probabilities).all():
            raise AidgnError(
                f"The {self.algorithm} model gives NaN or infinite outputs: its weights are damaged or its "
                "training diverged. Copy the model from its source again, or train again."
            )
        warnings = self.unfamiliar(outputs)
        chances = None
        if self.expectations is not None:
            chances = self.expectations.confidence.chances(self.trust_scores(outputs))
            warnings = add_doubts(warnings or [None] * len(chances), chances)
        return Prediction(
            [self.classes[c] for c in probabilities.argmax(1)],
            probabilities,
            self.classes,
            outputs.logits,
            outputs.features,
            warnings,
            chances,
        )

    def unfamiliar(self, outputs: Outputs) -> list[str | None] | None:
        """Return a warning for each image that is unlike the training images; None if the model cannot warn."""
        if self.novelty is None:
            return None
        return self.novelty.warnings(outputs.norms.numpy(), outputs.angles.numpy(), self.false_alarms)

    @property
    def temperature(self) -> float:
        """The divisor of logits that calibrates probabilities for unseen sites."""
        return 1.0 if self.expectations is None else self.expectations.confidence.temperature

    def trust_scores(self, outputs: Outputs) -> np.ndarray:
        """Compute the score that ranks labels by trust, float64 [N]."""
        assert self.expectations is not None
        name = self.expectations.confidence.score
        if name == "norm":
            return np.minimum(outputs.norms.numpy(), MAX_NORM)
        if name == "angle":
            return -outputs.angles.numpy()
        if name == "negative-aware norm":
            return negative_aware_norms(outputs.features.numpy())
        if name == DISTANCE:
            assert self.expectations.references is not None
            return -nearest_angles(outputs.features.numpy(), self.expectations.references)
        return logit_scores(outputs.logits.numpy(), self.temperature)[name]

    def site_monitor(self, most: int | None = None) -> SiteMonitor | None:
        """Return a collector of predictions that compares a new site with the training sites; None if it cannot.

        Args:
            most: Number of pictures to remember, the latest; by default all.
        """
        if self.expectations is None:
            return None
        return SiteMonitor(self.expectations, None if self.vectors is None else to_array(self.vectors), most)

    def batches(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Iterator[tuple[list[ImageLike], Prediction]]:
        """Yield images and their predictions batch by batch, for more images than memory holds.

        Args:
            images: The images. The next ones are decoded while the network computes.
            on_broken: Receives each image that cannot be read, and the error. By default the error is raised.
        """
        with closing(self.compute_batches(images, on_broken)) as batches:
            for readable, outputs in batches:
                yield readable, self.prediction(outputs)

    def compute_batches(
        self, images: Iterable[ImageLike], on_broken: OnBroken | None = None
    ) -> Generator[tuple[list[ImageLike], Outputs], None, None]:
        """Yield images with their outputs, after the next batch was queued on a GPU."""
        pending: deque[tuple[list[ImageLike], Callable[[], Outputs]]] = deque()
        on_gpu = self.uploads is not None
        with closing(streamed(images, self.slot, self.batch_size, on_broken, pinned=on_gpu)) as batches:
            for kept, pixels in batches:
                try:
                    pending.append((kept, self.launch(pixels)))
                    if len(pending) > self.in_flight:
                        kept, wait = pending.popleft()
                        yield kept, wait()
                finally:
                    if self.uploads is not None:  # the next batch may overwrite the pixels; the core is not kept busy
                        self.uploads.record_event(torch.cuda.Event(blocking=True)).synchronize()
        for kept, wait in pending:
            yield kept, wait()

    @torch.no_grad()
    def launch(self, pixels: Sequence[np.ndarray]) -> Callable[[], Outputs]:
        """Queue decoded images on the device, with the arithmetic of evaluation; return a function that waits.

        This does not wait for a GPU, which may read the pixels until `uploads` is done. The returned function waits for
        the outputs and returns them.
        """
        features, logits = compute_outputs(self.network, self.inputs(pixels))
        on_device = (features.float(), logits.float(), *norms_and_angles(features, logits, self.vectors))
        results = Outputs(*(tensor.to("cpu", non_blocking=True) for tensor in on_device))
        if self.uploads is None:
            return lambda: results
        done = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(blocking=True))

        def wait() -> Outputs:
            done.synchronize()
            return results

        return wait

    @torch.no_grad()
    def inputs(self, pixels: Sequence[np.ndarray]) -> Tensor:
        """Queue the upload of decoded images, and return the input of the network."""
        sizes = np.array([image.shape[:2] for image in pixels], np.int32)
        exact_fit = bool((sizes == self.image_size).all())
        largest = int(sizes.max())
        if (sizes == sizes[0]).all():
            sizes = sizes[:1]  # all are resized alike
        with torch.cuda.stream(self.uploads):  # while the GPU computes the batch before
            x = self.upload(pixels, largest)
            geometry = to_device(torch.from_numpy(np.tile(sizes, 2)), self.device)
        if self.uploads is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_stream(self.uploads)
            x.record_stream(stream)
            geometry.record_stream(stream)
        settings = self.preprocessing.transform_settings()
        return clean(x[:, :largest, :largest], geometry, self.image_size, exact_fit=exact_fit, **settings)

    def upload(self, pixels: Sequence[np.ndarray], largest: int) -> Tensor:
        """Copy images into slots on the device, each in the upper left corner.

        Images that worker processes decoded are copied from the shared memory: another copy in between would take this
        thread longer than everything else it does for a batch.
        """
        if self.uploads is not None and isinstance(pixels, Pixels) and pixels.memory is not None:
            memory = torch.from_numpy(pixels.memory)
            x = memory.new_empty(len(pixels), *memory.shape[1:], device=self.device)
            for start, stop, row in pixels.consecutive():
                x[start:stop].copy_(memory[row : row + stop - start], non_blocking=True)
            return x
        slots = torch.empty(len(pixels), largest, largest, 3, dtype=torch.uint8, pin_memory=self.uploads is not None)
        for place, image in zip(slots.numpy(), pixels, strict=True):
            place[: image.shape[0], : image.shape[1]] = image
        return to_device(slots, self.device)

    def forward(self, pixels: Sequence[np.ndarray]) -> Outputs:
        """Compute the outputs for decoded images, with the arithmetic of evaluation."""
        return self.launch(pixels)()


def add_doubts(warnings: list[str | None], chances: np.ndarray) -> list[str | None]:
    """Add a warning to images whose label is more likely wrong than right."""
    doubted = list(warnings)
    for i in np.flatnonzero(chances < UNSURE).tolist():
        doubt = f"unsure: such labels are right in {chances[i]:.0%} of cases"
        doubted[i] = "; ".join(filter(None, (doubt, warnings[i])))
    return doubted


def as_list(images: ImageLike | Iterable[ImageLike]) -> Iterable[ImageLike]:
    """Put a single image into a list; an array or tensor of four dimensions holds many."""
    if isinstance(images, np.ndarray | Tensor):
        return [images] if images.ndim < 4 else images
    if isinstance(images, str | bytes | Path | Image.Image) or not isinstance(images, Iterable):
        return [images]  # reading reports a wrong type
    return images
