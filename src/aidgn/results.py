"""Results of training. Notebooks display them as tables."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from aidgn.errors import AidgnError, UnknownNameError, plural
from aidgn.escape import for_html
from aidgn.inference import Model, load_model
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.reader import read_runs
from aidgn.runs.records import Record, Records, RunRecords, domain_names

if TYPE_CHECKING:
    import pandas

    from aidgn.report.table_formats import Table


@dataclass(frozen=True)
class Evaluation:
    """Accuracies of a run at one step.

    Args:
        step: Updates done.
        validation: Mean accuracy on the validation images of the source domains.
        accuracies: Accuracy on each domain: on the validation images of a source domain, and on the 80 % of an unseen
            domain's images that the protocol evaluates.
        unseen: Names of the unseen domains.
    """

    step: int
    validation: float
    accuracies: Mapping[str, float]
    unseen: Sequence[str]

    @property
    def accuracy(self) -> float:
        """The mean accuracy on the unseen domains; that on validation images if the run was trained on all domains."""
        accuracies = [self.accuracies[name] for name in self.unseen]
        return sum(accuracies) / len(accuracies) if accuracies else self.validation

    def __str__(self) -> str:
        unseen = [f"{name} (unseen) {self.accuracies[name]:.1%}" for name in self.unseen]
        return ", ".join([*unseen, f"validation {self.validation:.1%} at step {self.step}"])


@dataclass(frozen=True)
class RunResult:
    """A trained run.

    Args:
        folder: Folder of the run.
    """

    folder: Path

    @cached_property
    def _run(self) -> RunRecords:
        return read_runs(self.folder).runs[0]

    @property
    def dataset(self) -> str:
        """The name of the data set."""
        return str(self._run.args["dataset"])

    @property
    def algorithm(self) -> str:
        """The name of the algorithm in tables."""
        return str(self._run.args["algorithm"])

    @property
    def records(self) -> list[Record]:
        """One dictionary per evaluation."""
        return self._run.records()

    @cached_property
    def best(self) -> Evaluation:
        """The evaluation that training-domain validation selects."""
        record = self._run.record(self._run.select()[1])
        names = domain_names(self._run.args)
        targets = self._run.targets
        accuracies = {
            name: record[accuracy_key(domain, "in" if domain in targets else "out")]
            for domain, name in enumerate(names)
        }
        seen = [accuracies[name] for domain, name in enumerate(names) if domain not in targets]
        return Evaluation(record["step"], sum(seen) / len(seen), accuracies, [names[domain] for domain in targets])

    def model(self, device: str = "auto", algorithm: str | None = None) -> Model:
        """Load the model of the selected step.

        Args:
            device: cuda, cuda:1, mps or cpu.
            algorithm: path/to/file.py:Class if the algorithm is a custom one.
        """
        return load_model(self.folder, device, algorithm)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the records as a data frame with one row per evaluation."""
        return to_pandas(self.records)

    def __repr__(self) -> str:
        return f"<Run of {self.algorithm} on {self.dataset}: {self.best}; {self.folder}>"

    def _repr_html_(self) -> str:
        rows = [
            (name, "unseen" if name in self.best.unseen else "seen, validation images", f"{accuracy:.1%}")
            for name, accuracy in self.best.accuracies.items()
        ]
        caption = f"{self.algorithm} on {self.dataset}, step {self.best.step}: {self.folder}"
        return html_table(caption, ("Domain", "", "Accuracy"), rows)


@dataclass(frozen=True)
class SweepResult:
    """The runs of a sweep.

    Args:
        folder: Folder of the sweep.
        folders: The folders of the finished runs.
        failures: The runs that failed, with the reason.
    """

    folder: Path
    folders: Sequence[Path]
    failures: Mapping[str, str]

    @property
    def runs(self) -> list[RunResult]:
        """The finished runs."""
        return [RunResult(folder) for folder in self.folders]

    @cached_property
    def records(self) -> Records:
        """The records of the finished runs, one dictionary after the other."""
        return read_runs(*self.folders) if self.folders else Records([])

    def tables(self, selection: str = "training", spread: str = "sd", metric: str | None = None) -> "list[Table]":
        """Return a table for each data set and, if there are several, one over all of them.

        Args:
            selection: Selection method: training, leave-one-out or oracle.
            spread: "sd" for the standard deviation over trials, "se" for the standard error.
            metric: accuracy, balanced_accuracy, macro_f1, nll or ece; by default that of the data set.
        """
        from aidgn.report.table import tables

        return tables(self.records, selection, spread, metric=metric)

    def table(
        self, dataset: str | None = None, selection: str = "training", spread: str = "sd", metric: str | None = None
    ) -> "Table":
        """Return a table of results on unseen domains, which `str` formats as Markdown.

        Args:
            dataset: Name of a data set; by default the only data set, or all data sets together.
            selection: Selection method: training, leave-one-out or oracle.
            spread: "sd" for the standard deviation over trials, "se" for the standard error.
            metric: accuracy, balanced_accuracy, macro_f1, nll or ece; by default that of the data set.
        """
        made = self.tables(selection, spread, metric)
        if dataset is None:
            return made[-1]
        by_name = {table.dataset: table for table in made if table.dataset}
        if dataset not in by_name:
            raise UnknownNameError("data set in this sweep called", dataset, by_name)
        return by_name[dataset]

    def compare(self, selection: str = "training", metric: str = "accuracy") -> "list[Table]":
        """Return tables of paired differences with tests, and of average ranks; `str` formats each as Markdown.

        Args:
            selection: Selection method: training, leave-one-out or oracle.
            metric: accuracy, balanced_accuracy, macro_f1, nll or ece.
        """
        from aidgn.report.comparison import comparison_tables

        return comparison_tables(self.records, selection, metric)

    def to_pandas(self) -> "pandas.DataFrame":
        """Return the records as a data frame with one row per evaluation."""
        return to_pandas(self.records)

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"<Sweep: {plural(len(self.folders), 'run')} finished{failed}; {self.folder}>"

    def _repr_html_(self) -> str:
        shown = [table._repr_html_() for table in self.tables()] if self.folders else [for_html(repr(self))]
        if self.failures:
            shown.append(html_table("Failed runs", ("Run", "Error"), self.failures.items()))
        return "\n".join(shown)


def to_pandas(records: Iterable[Record]) -> "pandas.DataFrame":
    """Return a data frame with a row per record: run, step, accuracies, terms of the objective, hyper-parameters."""
    try:
        import pandas
    except ImportError:
        raise AidgnError("to_pandas needs pandas, which is not installed: pip install pandas.") from None
    rows = []
    for record in records:
        args = record["args"]
        names = domain_names(args)
        rows.append(
            {
                "dataset": args["dataset"],
                "algorithm": args["algorithm"],
                "target": ", ".join(names[target] if names else str(target) for target in args["test_envs"]),
                "trial": args["trial_seed"],
                "draw": args["hparams_seed"],
                **{name: value for name, value in record.items() if not isinstance(value, dict)},
                **{f"hparams.{name}": value for name, value in record["hparams"].items()},
            }
        )
    return pandas.DataFrame(rows)


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Compose a table for notebooks."""
    head = "".join(f"<th>{for_html(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{for_html(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{for_html(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
