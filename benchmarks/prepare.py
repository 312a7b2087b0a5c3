"""Compare the speed of preparing a data set with bare decoding by as many processes that store nothing.

    python benchmarks/prepare.py --images 4000 --size 227

Aim: at least 0.90 of the speed of bare decoding; time proportional to the number of images; an unchanged data set is
recognised well within a second for 10,000 files.
"""

import argparse
import io
import resource
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from PIL import Image

from aidgn.data import Dataset, load_dataset
from aidgn.data.cache import prepare
from aidgn.data.images import largest_slot, read_shrunk
from aidgn.data.row_cache import usable_cores


def generate(root: Path, count: int, size: int) -> None:
    """Write JPEG files of smooth shades with some noise, which have about as many bytes per pixel as photographs."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size] / size * 8
    for number in range(count):
        path = root / "ab"[number % 2] / "xy"[number // 2 % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        if number % 16 == 0:
            waves = np.stack([np.sin(rng.normal() * x + rng.normal() * y) for _ in range(3)], axis=2)
            values = 128 + 80 * waves + rng.normal(0, 12, waves.shape)
            buffer = io.BytesIO()
            Image.fromarray(values.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=90)
        path.write_bytes(buffer.getvalue() + number.to_bytes(4, "big"))


def clocks() -> np.ndarray:
    """Return the seconds of the clock, and of the processor for this process and its ended children.

    On a machine that is busy with other work, only the second number means something.
    """
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return np.array([time.perf_counter(), own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime])


def decode_only(slot: int, path: str) -> int:
    return len(read_shrunk(path, slot)[0].tobytes())


def bare(dataset: Dataset, workers: int, slot: int) -> np.ndarray:
    """Return the seconds to decode all images to uint8, with the start of the processes, as in `prepare`."""
    paths = [f"{dataset.root}/{file}" for file in dataset.files]
    start = clocks()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        decoded = sum(1 for _ in pool.map(partial(decode_only, slot), paths, chunksize=16))
    assert decoded == len(paths)
    return clocks() - start


def prepared(dataset: Dataset, workers: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds to prepare the data set, and to find that nothing has changed."""
    with tempfile.TemporaryDirectory() as folder:
        seconds = []
        for expected in (len(dataset), 0):
            start = clocks()
            assert prepare(dataset, cache_dir=Path(folder), workers=workers).decoded == expected
            seconds.append(clocks() - start)
    return seconds[0], seconds[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=4000)
    parser.add_argument("--size", type=int, default=227, help="pixels per side")
    parser.add_argument("--workers", type=int, default=usable_cores())
    parser.add_argument("--repeats", type=int, default=3, help="the fastest of so many, taken in turns, counts")
    parser.add_argument("--folder", type=Path, help="an existing data set instead of generated images")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.folder is None:
            generate(Path(folder), arguments.images, arguments.size)
        dataset = load_dataset(arguments.folder or Path(folder))
        quarter = dataset.without(set(range(len(dataset))) - set(range(0, len(dataset), 4)))
        limit = largest_slot(dataset.image_size)
        times = []
        for _ in range(arguments.repeats):
            times.append(
                (
                    bare(dataset, arguments.workers, limit),
                    *prepared(dataset, arguments.workers),
                    prepared(quarter, arguments.workers)[0],
                )
            )
    decoding, preparing, again, preparing_quarter = np.min(times, axis=0)
    ratio, work = decoding / preparing
    print(f"{len(dataset)} images, {arguments.workers} workers, the fastest of {arguments.repeats}")
    for name, (seconds, cores) in {
        "bare decoding": decoding,
        "prepare": preparing,
        "a quarter of it": preparing_quarter,
        "nothing changed": again,
    }.items():
        print(f"{name:16} {seconds:7.3f} s   {cores:7.3f} s of all cores")
    print(f"speed of bare decoding reached: {ratio:.2f} by the clock, {work:.2f} by work done (aim 0.90)")
    print(
        f"four times the images take {preparing[0] / preparing_quarter[0]:.2f} times as long, "
        f"{preparing[1] / preparing_quarter[1]:.2f} times the work (linear: 4, less the start)"
    )
    return 0 if ratio >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
