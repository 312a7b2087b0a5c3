"""The functions at the top of the package, which train and return results that notebooks display."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aidgn.algorithms import ALGORITHMS, find
from aidgn.errors import AidgnError, UnknownNameError
from aidgn.inference import load_model
from aidgn.progress import RunDisplay
from aidgn.runs.records import Record, RunRecords, domain_names
from aidgn.runs.spec import RunSpec
from aidgn.selection import read_runs
from aidgn.training import train as train_run

if TYPE_CHECKING:
    import pandas

    from aidgn.inference.model import Model


def list_algorithms() -> list[str]:
    """Return the names of the algorithms.

    Example:
        >>> import aidgn
        >>> "AIDGN" in aidgn.list_algorithms()
        True
    """
    return list(ALGORITHMS)


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
        folder: Where the run is stored.
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
        validation, position = self._run.select()
        record = self._run.record(position)
        names = domain_names(self._run.args)
        targets = self._run.targets
        accuracies = {
            name: record[f"env{domain}_{'in' if domain in targets else 'out'}_acc"] for domain, name in enumerate(names)
        }
        return Evaluation(record["step"], validation, accuracies, [names[domain] for domain in targets])

    def model(self, device: str = "auto", algorithm: str | None = None) -> "Model":
        """Load the model of the selected step.

        Args:
            device: cuda, cuda:1 or cpu.
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


def train(
    dataset: str,
    *,
    target: str | Sequence[str],
    algorithm: str = "AIDGN",
    out: str | Path = "runs",
    data_dir: str | Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    devices: int = 1,
    trackers: Sequence[str] = (),
    progress: bool = True,
    **options: Any,
) -> RunResult:
    """Train one run. A finished run is loaded, an interrupted one is continued.

    Args:
        dataset: Name of a data set, or a folder ROOT/<domain>/<class>/<image>.
        target: Unseen domains, by name or letter; () trains on all domains.
        algorithm: Name of an algorithm, or path/to/file.py:Class.
        out: Where run folders are.
        data_dir: Where data sets are.
        device: cuda, cuda:1 or cpu.
        precision: Arithmetic of the network: bfloat16, tf32 or float32.
        devices: GPUs that share each step.
        trackers: Names of trackers that show the records: tensorboard, wandb, mlflow.
        progress: Whether to show progress.
        options: Options of a run (fields of `aidgn.RunSpec`, such as `steps`), and hyper-parameters of the algorithm
            (such as `lr`).

    Returns:
        The run, with `best`, `records`, `model()` and `to_pandas()`.

    Example:
        >>> import aidgn
        >>> run = aidgn.train("digits", target="ink", algorithm="ERM", steps=20, lr=2e-3, device="cpu")
        >>> run.best.accuracy > 0
        True
    """
    settings, hyper_parameters = split_options(options, RunSpec, [algorithm])
    spec = RunSpec(dataset, algorithm, target, hyper_parameters=hyper_parameters, **settings)
    with RunDisplay(progress) as display:
        folder = train_run(
            spec,
            out,
            data_dir=data_dir,
            device=device,
            precision=precision,
            devices=devices,
            trackers=trackers,
            on_progress=display.run,
        )
    return RunResult(folder)


def split_options(
    given: Mapping[str, Any], options: type[Any], algorithms: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the options from hyper-parameters.

    Args:
        given: Both, by name. `hyper_parameters` may hold a mapping with more of the latter.
        options: The dataclass whose fields are the options.
        algorithms: The algorithms that have the hyper-parameters.
    """
    known = [field.name for field in fields(options)]
    settings = {name: value for name, value in given.items() if name in known}
    hyper_parameters = dict(settings.pop("hyper_parameters", None) or {})
    hyper_parameters |= {name: value for name, value in given.items() if name not in known}
    spaces = {name: None for algorithm in algorithms for name in find(algorithm).search_space}
    for name in given:
        if name not in known and name not in spaces:
            raise UnknownNameError(
                "option or hyper-parameter",
                name,
                [*known, *spaces],
                f"Options: {', '.join(known)}. Hyper-parameters of {', '.join(algorithms)}: {', '.join(spaces)}.",
            )
    return settings, hyper_parameters


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
    head = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<table><caption>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
