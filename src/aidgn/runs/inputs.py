"""Open a trained run as input of another command: its folder, its algorithm, and its images."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from aidgn.algorithms import find
from aidgn.algorithms.custom import source_of
from aidgn.data import DATASETS, Dataset, load_dataset
from aidgn.data.loading import load_folder
from aidgn.data.source import DataSource
from aidgn.errors import AidgnError, plural
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata


def open_run(path: str | Path) -> RunFolder:
    """Open the folder of a finished run, and check that its run.json has everything that analyses need."""
    path = Path(path)
    if path.is_file():
        raise AidgnError(f"{path} is a file: give the folder of a finished run.")
    run = find_run(path, RunFolder(path).model)
    run.metadata.check_complete("dataset", "algorithm", "target", "trial", "draw", "data")
    return run


def find_run(path: Path, weights: Path) -> RunFolder:
    """Return the run that a model belongs to, after checking that there is a model."""
    run = RunFolder(weights.parent)
    expected = (
        f"expected the folder of `aidgn fit` or of a finished run, {run.model.name} or {run.last.name} in it"
        ", or the .safetensors file of `aidgn export`"
    )
    if not path.exists():
        raise AidgnError(f"The model {path} does not exist: {expected}.")
    if weights.suffix == ".onnx":
        raise AidgnError(
            f"{path} is for other programs; here give the {run.model.name} that `aidgn export` wrote next to it."
        )
    if weights.suffix != ".safetensors":
        raise AidgnError(f"{path} is not a model: {expected}.")
    if not run.exists:
        places = "runs/*", "*", "*/model"  # the last: models of `aidgn fit`
        runs = next(filter(None, (RunFolder.find(path, place) for place in places)), [])
        if runs:
            raise AidgnError(f"{path} holds {plural(len(runs), 'run')}: give one, such as {runs[0]}.")
        raise AidgnError(
            f"{run} is not the folder of a run: it has no {run.metadata_file.name}, which describes the network; "
            f"{expected}."
        )
    if not weights.exists():
        curves = "It has no records yet either."
        if run.records:
            curves = f"`aidgn report {shlex.quote(str(run))}` shows its curves so far."
        raise AidgnError(
            f"The run {path} is not finished: it has no {weights.name} yet. {curves} The `aidgn train` "
            "command that started it goes on with it."
        )
    return run


def choose_custom_algorithm(metadata: RunMetadata, custom: str | Sequence[str] | None) -> str | None:
    """Choose the run's FILE.py:CLASS among those for many runs: by name, then by the digest of the file."""
    identity = metadata.identity
    if identity.get("source") is None:
        return None

    def score(name: str) -> tuple[bool, bool]:
        algorithm = find(name)
        return metadata.label.name == algorithm.name(), identity["source"] == source_of(algorithm)

    names = [custom] if isinstance(custom, str) else custom or ()
    return max(names, key=score, default=None)


def find_dataset(metadata: RunMetadata, data: str | Path | None, data_dir: str | Path | None = None) -> Dataset:
    """Find a run's data set: in `data`, else where the training found it, else in `data_dir`."""
    metadata.check_complete("dataset")
    name, root = metadata.identity["dataset"], metadata.root
    info = DATASETS.get(name)
    source = None if root is None else DataSource.parse(root)
    if name == "digits":
        dataset = load_dataset(name)
    elif source is not None and (source.options or source.is_table) and (data is not None or source.exists):
        dataset = load_dataset(source if data is None else source.moved(data))
    elif data is not None and (info is None or info.matches(data)):
        dataset = load_folder(Path(data), info)
    elif data is None and root is not None and Path(root).is_dir():
        dataset = load_folder(Path(root), info)
    elif info is not None:
        try:
            dataset = load_dataset(name, data_dir if data is None else data)
        except AidgnError as error:  # commands on runs have --data instead of --data-dir
            raise AidgnError(str(error).replace("--data-dir", "--data")) from None
    else:
        reason = f"{root} does not exist" if root else "run.json does not say where they were"
        raise AidgnError(
            f"The images of {metadata.path.parent} were not found: {reason}. Give the folder of {name} with --data DIR."
        )
    return dataset.with_image_size(metadata.image_size)
