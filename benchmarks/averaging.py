"""Measure the gain of averaged weights within one and the same training.

    python benchmarks/averaging.py PACS --algorithm ERM --target sketch --weights resnet50.safetensors --out runs
    aidgn table runs

Two trainings on a GPU differ by chance, on PACS by several points. Here only the averaging differs: the run trains and
writes the same files as `aidgn train`, and every evaluation also measures averages of its weights. Records of the
averages go into further run folders, as `aidgn train --average sma` (or swad) would write them. The averaged weights
are not kept.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aidgn.algorithms import Algorithm
from aidgn.backbones import Preprocessing
from aidgn.data.loader import BatchStore
from aidgn.files import write_text
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.run_id import folder_name
from aidgn.training import RunSpec, trainer
from aidgn.training.averaging import AVERAGES
from aidgn.training.trainer import Minibatches, Trainer


class AveragingTrainer(Trainer):
    """A run that also measures averages of its weights, unless it trains with an average itself."""

    names: tuple[str, ...] = ("sma",)

    def __init__(
        self,
        spec: RunSpec,
        algorithm: Algorithm,
        images: BatchStore,
        constants: Mapping[str, Any],
        preprocessing: Preprocessing,
    ):
        super().__init__(spec, algorithm, images, constants, preprocessing)
        self.averages: dict[str, Trainer] = {}
        for name in () if spec.average else self.names:
            averaged = replace(spec, average=name)
            args = {**constants["args"], "algorithm": str(averaged.label())}
            self.averages[name] = Trainer(averaged, algorithm, images, {**constants, "args": args}, preprocessing)
        self.records: dict[str, list[dict[str, Any]]] = {name: [] for name in self.averages}

    def train_step(self, minibatches: Minibatches) -> None:
        super().train_step(minibatches)
        for other in self.averages.values():
            assert other.average is not None
            other.step = self.step
            other.average.after_step(self.step)

    def evaluate(self) -> dict[str, Any]:
        for name, other in self.averages.items():
            other.terms.load_state(self.terms.state())
            self.records[name].append(other.evaluate())
        record = super().evaluate()
        for records in self.records.values():
            records[-1]["step_time"] = record["step_time"]
        return record

    def state(self) -> dict[str, Any]:
        averages = {
            name: {"average": other.average.state(), "records": json.dumps(self.records[name])}
            for name, other in self.averages.items()
            if other.average
        }
        return {**super().state(), "averages": averages}

    def load_state(self, state: Mapping[str, Any] | None) -> None:
        super().load_state(state)
        if state is None:
            return
        for name, other in self.averages.items():
            assert other.average is not None
            other.average.load_state(state["averages"][name]["average"])
            self.records[name] = json.loads(state["averages"][name]["records"])

    def finish(self, folder: RunWriter) -> None:
        """Write the folders of the averages first, because a finished run is not trained again."""
        metadata = RunFolder(folder.path).metadata
        for name, records in self.records.items():
            identity = {**metadata.identity, "algorithm": str(self.averages[name].spec.label()), "average": name}
            averaged = RunWriter(folder.path.parent / folder_name(identity))
            averaged.path.mkdir(exist_ok=True)
            write_text(averaged.results, "".join(json.dumps(record) + "\n" for record in records))
            averaged.write_metadata(replace(metadata, identity=identity))
        super().finish(folder)


def measure_averages() -> None:
    """Let `aidgn.training.train` train every run of this process with averages."""
    trainer.Trainer = AveragingTrainer  # type: ignore[misc]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--algorithm", default="ERM")
    parser.add_argument("--target", required=True)
    parser.add_argument("--trial", type=int, default=0)
    parser.add_argument("--weights")
    parser.add_argument("--backbone")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--average", nargs="+", choices=list(AVERAGES), default=list(AVERAGES))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    given = vars(parser.parse_args())
    AveragingTrainer.names = tuple(given.pop("average"))
    data, out = given.pop("data"), given.pop("out")
    measure_averages()
    print(trainer.train(RunSpec(**given), out, data_dir=data))
