"""What averaging the weights gains on one and the same training.

    python benchmarks/averaging.py PACS --algorithm ERM --target sketch --weights resnet50.safetensors --out runs
    aidgn table runs

Two trainings on a GPU differ by chance, on PACS by points. Here nothing but the averaging does: the run is trained and
written as `aidgn train` does it, and at every evaluation averages of its weights are measured too. Their records are
written beside it, as `aidgn train --average sma` (swad) would write them; the averaged weights are not kept.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from aidgn.files import write_text
from aidgn.runs.folder import RunFolder, RunWriter
from aidgn.runs.run_id import folder_name
from aidgn.training import RunSpec
from aidgn.training import trainer as run
from aidgn.training.averaging import AVERAGES
from aidgn.training.loop import Trainer


class AlsoAveraged(Trainer):
    """A run that measures averages of its weights beside them."""

    averages: tuple[str, ...] = ("sma",)
    latest: "AlsoAveraged | None" = None

    def __init__(self, spec: RunSpec, *others: Any):
        super().__init__(spec, *others)
        *others, args = others
        self.beside: dict[str, Trainer] = {}
        for name in self.averages:
            averaged = replace(spec, average=name)
            self.beside[name] = Trainer(averaged, *others, {**args, "algorithm": str(averaged.label())})
        self.records: dict[str, list[dict[str, Any]]] = {name: [] for name in self.averages}
        AlsoAveraged.latest = self

    def note(self, terms: Mapping[str, Tensor | float]) -> None:
        super().note(terms)
        for other in self.beside.values():
            assert other.average is not None
            other.average.after_step(self.step)

    def evaluate(self) -> dict[str, Any]:
        for name, other in self.beside.items():
            other.step, other.sums, other.counts = self.step, self.sums, self.counts
            self.records[name].append(other.evaluate())
        return super().evaluate()

    def go(self) -> Iterator[dict[str, Any] | None]:
        for record in super().go():
            if record is not None:
                for records in self.records.values():
                    records[-1]["step_time"] = record["step_time"]
            yield record

    def state(self) -> dict[str, Any]:
        beside = {
            name: {"average": other.average.state(), "records": json.dumps(self.records[name])}
            for name, other in self.beside.items()
            if other.average
        }
        return {**super().state(), "beside": beside}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for name, other in self.beside.items():
            assert other.average is not None
            other.average.load_state(state["beside"][name]["average"])
            self.records[name] = json.loads(state["beside"][name]["records"])


def train(spec: RunSpec, out: str | Path, **options: Any) -> Path:
    """`aidgn.training.train`, with the averages."""
    AlsoAveraged.latest, run.Trainer = None, AlsoAveraged  # type: ignore[misc]
    folder = plain_train(spec, out, **options)
    trained = AlsoAveraged.latest
    if trained is None:  # it was finished before
        return folder
    metadata = RunFolder(folder).metadata
    for name, records in trained.records.items():
        identity = {**metadata.identity, "algorithm": str(trained.beside[name].spec.label()), "average": name}
        averaged = RunWriter(Path(out) / folder_name(identity))
        averaged.path.mkdir(exist_ok=True)
        write_text(averaged.results, "".join(json.dumps(record) + "\n" for record in records))
        averaged.write_metadata(replace(metadata, identity=identity))
    return folder


plain_train = run.train


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
    AlsoAveraged.averages = tuple(given.pop("average"))
    data, out = given.pop("data"), given.pop("out")
    print(train(RunSpec(**given), out, data_dir=data))
