"""Measure time and memory from a sweep on disk to its table. Aim: 15,000 runs of 100 records in 10 s and 2 GB.

The script writes 2.3 GiB to the temporary folder and removes them.

    python benchmarks/table.py --runs 15000 --records 100
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice, product
from pathlib import Path

import numpy as np

DATASETS = ("PACS", "VLCS", "OfficeHome", "TerraIncognita")
ALGORITHMS = (
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
)


def write_sweep(folder: Path, runs: int, records: int) -> int:
    """Write runs in DomainBed's format with accuracies of 16 digits; return the number of bytes."""
    generator = np.random.default_rng(0)
    written = 0
    sweep = product(DATASETS, ALGORITHMS, range(3), range(4), range(20))
    for number, (dataset, algorithm, trial, target, draw) in enumerate(islice(sweep, runs)):
        run = folder / f"{number:05d}"
        run.mkdir()
        args = {
            "algorithm": algorithm,
            "checkpoint_freq": 50,
            "data_dir": "/data/domain_generalization/",
            "dataset": dataset,
            "holdout_fraction": 0.2,
            "hparams": None,
            "hparams_seed": draw,
            "output_dir": str(run),
            "save_model_every_checkpoint": False,
            "seed": number,
            "skip_model_save": False,
            "steps": 5000,
            "task": "domain_generalization",
            "test_envs": [target],
            "trial_seed": trial,
            "uda_holdout_fraction": 0,
            "backbone": "resnet50",
            "precision": "bfloat16",
            "weights": "hub:torchvision/resnet50.imagenet1k_v1",
            "classes": [f"class_of_images_{i:02d}" for i in range(20)],
        }
        hparams = {
            "batch_size": 32,
            "class_balanced": False,
            "data_augmentation": True,
            "lr": generator.random(),
            "nonlinear_classifier": False,
            "resnet18": False,
            "resnet_dropout": 0.1,
            "weight_decay": generator.random(),
            "kappa": 110.0,
            "gamma": 0.001,
            "beta": 0.3,
            "eta": 0.04,
        }
        front, back = json.dumps(args), json.dumps(hparams)
        lines = []
        for step, values in enumerate(generator.random((records, 11)).tolist()):
            accuracies = ", ".join(f'"env{i // 2}_{"out" if i % 2 else "in"}_acc": {values[i]!r}' for i in range(8))
            lines.append(
                f'{{"args": {front}, {accuracies}, "epoch": {values[8]!r}, "hparams": {back}, '
                f'"loss": {values[9]!r}, "mem_gb": 12.25, "step": {50 * step}, '
                f'"step_time": {values[10]!r}}}\n'
            )
        text = "".join(lines)
        (run / "results.jsonl").write_text(text)
        written += len(text)
    return written


def measure(folder: Path) -> None:
    from aidgn.report.table import tables
    from aidgn.report.table_formats import to_markdown
    from aidgn.runs.reader import read_runs

    began = time.perf_counter()
    records = read_runs(folder)
    loaded = time.perf_counter()
    text = "\n".join(to_markdown(table) for table in tables(records, "training", "se", True))
    done = time.perf_counter()
    print(text[: text.index("\n\n")])
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(
        f"{len(records)} records of {len(records.runs)} runs: loaded in {loaded - began:.1f} s, selected and "
        f"tabulated in {done - loaded:.1f} s, together {done - began:.1f} s"
    )
    print(
        f"{sum(one.ru_utime + one.ru_stime for one in usage):.1f} s of processor time, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; peak memory {usage[0].ru_maxrss / 2**20:.2f} GiB, of the largest helper "
        f"{usage[1].ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15000)
    parser.add_argument("--records", type=int, default=100)
    parser.add_argument("--folder", type=Path, help="measure a sweep that is there instead of writing one")
    options = parser.parse_args()
    if options.folder:
        measure(options.folder)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            size = write_sweep(Path(temporary), options.runs, options.records)
            print(f"wrote {options.runs} runs of {options.records} records, {size / 2**30:.2f} GiB")
            # In a separate process, so that its peak memory is that of reading alone.
            subprocess.run([sys.executable, __file__, "--folder", temporary], check=True)
