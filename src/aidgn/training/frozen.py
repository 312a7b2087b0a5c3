"""Features of a frozen network, computed once for each image and kept on disk; runs train on them.

The features of an image depend on its content, on the network with its weights and precision, and on how images are
prepared, so all runs, targets and trials share them. View 0 of an image is the whole image, as evaluation sees it; the
others are augmented, with random numbers that follow from the image's content and the number of the view.
"""

import hashlib
import json
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from aidgn import backbones
from aidgn.backbones import IMAGENET, Preprocessing
from aidgn.data import transforms
from aidgn.data.cache import DecodedDataset, cache_folder
from aidgn.data.cache_index import CacheEntry, CacheIndex
from aidgn.data.loader import DEVICE_SHARE, Batch, DeviceImageStore, to_device
from aidgn.data.row_cache import Progress, RowCache, usable_cores
from aidgn.devices import PRECISIONS
from aidgn.files import open_no_link, write_at
from aidgn.training.featurizer import EVAL_BATCH, NetworkRunner

VERSION = 1  # raise it when features are computed differently: those on disk are then computed again
CPU_BATCH = 32  # images per forward pass on the CPU
PREFIX = "featurizer.network."  # of the network's tensors in the weights of a whole model


class FrozenNetwork:
    """A pretrained network that only computes features.

    Args:
        network: Network with folded batch norm and `num_features`, on its device.
        precision: Name in `aidgn.devices.PRECISIONS`.
        preprocessing: What the network expects.
    """

    def __init__(self, network: nn.Module, precision: str, preprocessing: Preprocessing = IMAGENET):
        self.network = network.eval().requires_grad_(False)
        self.precision = precision
        self.preprocessing = preprocessing
        self.num_features = int(network.num_features)  # type: ignore[arg-type]
        self.tensors = {f"{PREFIX}{name}": tensor for name, tensor in network.state_dict().items()}
        digest = hashlib.sha256()
        for name, tensor in sorted(self.tensors.items()):
            digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        strides = [module.stride for module in network.modules() if isinstance(module, nn.Conv2d)]
        self.digest = hashlib.sha256(f"{digest.hexdigest()} {strides}".encode()).hexdigest()[:32]
        backbones.freeze_folded(network, torch.bfloat16 if PRECISIONS[precision].autocast else torch.float32)
        self.runner = NetworkRunner(network, precision, compiled=False)

    @property
    def weights(self) -> tuple[str, dict[str, Tensor]]:
        """The digest and the tensors, for the folder of a run."""
        return self.digest, self.tensors

    @torch.inference_mode()
    def __call__(self, x: Tensor) -> Tensor:
        return self.runner(x).float()


class FeatureInput(nn.Module):
    """The featurizer of an algorithm whose batches are features already."""

    def __init__(self, num_features: int):
        super().__init__()
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        return x


class FeatureIndex(CacheIndex):
    """The index of a file with a row of float32 features for each view of an image."""

    index_name: ClassVar[str] = "features-index"
    lock_name: ClassVar[str] = "features-lock"
    rows_name: ClassVar[str] = "features"
    suffix: ClassVar[str] = "f32"
    dtype: ClassVar[type[np.generic]] = np.float32

    @staticmethod
    def row_shape(slot: int) -> tuple[int, ...]:
        return (slot,)


class FeatureCache(RowCache):
    """The features of a data set's images by one network. Rows are named by the image's content and the view."""

    index_type = FeatureIndex

    def __init__(
        self,
        images: DeviceImageStore,
        network: FrozenNetwork,
        views: int,
        cache_dir: Path | None,
        on_progress: Progress,
    ):
        decoded = images.decoded
        dataset = decoded.dataset
        self.images = images
        self.network = network
        settings = network.preprocessing.transform_settings()
        self.augment, self.clean = images.transforms(settings)
        self.image_of = {name: number for number, name in enumerate(decoded.digests)}
        names = [f"{digest}-{view}" for view in range(views + 1) for digest in self.image_of]
        preparation = [transforms.SCALE, transforms.RATIO, transforms.JITTER, transforms.GREY_PROBABILITY]
        key = json.dumps([VERSION, network.digest, network.precision, dataset.image_size, preparation, settings])
        super().__init__(
            cache_folder(dataset, cache_dir),
            hashlib.sha256(key.encode()).hexdigest()[:16],
            names,
            f"features of {dataset.name}",
            on_progress,
        )

    def find_missing(self, index: CacheIndex) -> Iterator[tuple[str, None]]:
        for name in self.names:
            if name not in index.entries:
                yield name, None

    def add_missing(self, suspects: Sequence[str]) -> set[str]:
        index = self.load() or FeatureIndex.create(self.index_path, self.network.num_features)
        self.remove_left_overs(index)
        for name in index.find_damaged(suspects, usable_cores()):
            index.entries.pop(name, None)
        missing = {name for name, _ in self.find_missing(index)}
        self.check_space(len(missing) * index.row_bytes(index.slot))
        done = len(self.names) - len(missing)
        self.on_progress(done, len(self.names))
        with closing(self._compute(index, missing)) as computed, closing(self.commit(index, computed)) as entries:
            for _ in entries:
                done += 1
                if done % 8 == 0 or done == len(self.names):
                    self.on_progress(done, len(self.names))
        return missing

    def _compute(self, index: CacheIndex, missing: set[str]) -> Generator[CacheEntry, None, None]:
        """Compute the missing rows, in batches that are always cut alike, because rounding depends on the batch."""
        size = EVAL_BATCH if self.images.device.type == "cuda" else CPU_BATCH
        with open_no_link(index.pixels, "r+b") as file:
            row_bytes = index.row_bytes(index.slot)
            row = -(-index.pixels.stat().st_size // row_bytes)
            count = len(self.image_of)
            for start in range(0, len(self.names), count):
                for first in range(start, start + count, size):
                    names = self.names[first : min(first + size, start + count)]
                    if missing.isdisjoint(names):
                        continue
                    for name, features in zip(names, self._features(names), strict=True):
                        if name in missing:
                            content = features.tobytes()
                            write_at(file, content, row * row_bytes)
                            yield CacheEntry(name, [], "", row, checksum=zlib.crc32(content))
                            row += 1

    def _features(self, names: Sequence[str]) -> np.ndarray:
        digests = [name.rpartition("-")[0] for name in names]
        view = int(names[0].rpartition("-")[2])
        rows = torch.tensor([self.image_of[digest] for digest in digests])
        ((pixels, geometry, _),) = self.images.batches([rows])
        if view == 0:
            x = self.clean(pixels, geometry)
        else:
            uniforms = torch.from_numpy(np.stack([draw_uniforms(digest, view) for digest in digests]))
            x = self.augment(pixels, geometry, to_device(uniforms, self.images.device))
        return self.network(x).cpu().numpy()


def draw_uniforms(digest: str, view: int) -> np.ndarray:
    """Draw the random numbers of an augmented view from the digest of the image."""
    random = np.random.Generator(np.random.Philox(key=int(digest[:32], 16), counter=[0, 0, 0, view]))
    return random.random(transforms.UNIFORMS, dtype=np.float32)


@dataclass(eq=False)
class FeatureStore:
    """A `BatchStore` of features: batches have image indices, which `transforms` turn into features."""

    decoded: DecodedDataset
    device: torch.device
    features: np.ndarray  # rows of features, read-only
    rows: np.ndarray  # row of each view of each image, int64 [views + 1, N]
    network: FrozenNetwork | None = None  # that computed them; None if they came without one

    def __post_init__(self) -> None:
        self.labels = torch.from_numpy(np.ascontiguousarray(self.decoded.dataset.labels)).to(self.device)
        self.resident: Tensor | None = None  # all views of all images, [views + 1, N, n]
        size = 4 * self.rows.size * self.features.shape[1]
        if self.device.type == "cuda" and size <= DEVICE_SHARE * torch.cuda.mem_get_info(self.device)[0]:
            self.resident = torch.from_numpy(self.features[self.rows]).to(self.device)

    @property
    def frozen_weights(self) -> tuple[str, dict[str, Tensor]] | None:
        return None if self.network is None else self.network.weights

    def batches(self, rows: Sequence[Tensor]) -> Iterator[Batch]:
        for row in rows:
            index = to_device(row, self.device)
            yield index, index, self.labels[index]

    def transforms(self, settings: Mapping[str, Any] = {}) -> tuple[transforms.TrainTransform, transforms.Transform]:
        """Return the training and the evaluation transform: a random view, and the whole image."""
        views = len(self.rows)

        def random_view(index: Tensor, _: Tensor, uniforms: Tensor) -> Tensor:
            return self._look_up((uniforms[:, 0] * views).long(), index)

        def whole_image(index: Tensor, _: Tensor) -> Tensor:
            return self._look_up(torch.zeros_like(index), index)

        return random_view, whole_image

    def _look_up(self, view: Tensor, index: Tensor) -> Tensor:
        if self.resident is not None:
            return self.resident[view, index]
        rows = self.rows[view.cpu().numpy(), index.cpu().numpy()]
        return torch.from_numpy(self.features.take(rows, axis=0)).to(self.device)


def load_features(
    images: DeviceImageStore,
    network: FrozenNetwork,
    views: int = 0,
    *,
    cache_dir: Path | None = None,
    on_progress: Progress | None = None,
) -> FeatureStore:
    """Return the features of all images, after computing those that are not on disk.

    Args:
        images: The images, on the device of the network.
        network: The network.
        views: Number of augmented views of each image.
        cache_dir: Folder of the caches; None for the default.
        on_progress: Called with the number of rows ready and of all.
    """
    cache = FeatureCache(images, network, views, cache_dir, on_progress or (lambda done, total: None))
    index, _ = cache.open()
    digests = images.decoded.digests
    rows = np.array([[index.entries[f"{digest}-{view}"].row for digest in digests] for view in range(views + 1)])
    return FeatureStore(images.decoded, images.device, index.map, rows, network)


@lru_cache(1)
def load_network(
    backbone: str,
    weights: str,
    identity: str,
    precision: str,
    preprocessing: Preprocessing,
    image_size: int,
    device: torch.device,
) -> FrozenNetwork:
    """Return the network of a run with its pretrained weights, from the last run of this process if it is the same.

    Args:
        backbone: Name of the backbone.
        weights: `hub` or a file.
        identity: Result of `weights_identity`, which differs if the file has changed since the last run.
        precision: Name in `aidgn.devices.PRECISIONS`.
        preprocessing: How images are prepared for the network.
        image_size: Side of the images in pixels.
        device: Where to compute.
    """
    network = backbones.create(backbone, weights=weights, image_size=image_size)
    backbones.fold(network)
    return FrozenNetwork(network.to(device).to(memory_format=torch.channels_last), precision, preprocessing)
