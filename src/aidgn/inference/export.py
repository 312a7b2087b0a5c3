"""Write a trained run as files for others: ONNX, one self-contained safetensors file, and a model card."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aidgn import hub
from aidgn.data import Dataset
from aidgn.data.cache import content_of
from aidgn.errors import AidgnError
from aidgn.files import temporary_folder, write_text
from aidgn.inference.loading import find_model, load_model
from aidgn.inference.model_card import write_model_card
from aidgn.inference.onnx_export import ONNX_FILE, OnnxCheck, check_exportable, write_onnx
from aidgn.runs.checkpoints import read_model, read_values, read_weights, write_weights
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import choose_custom_algorithm, find_dataset, open_run
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.run_id import identify_images

# Values of run.json in the exported file. Paths and file names of the training data stay private.
EXPORTED_METADATA = (
    "identity",
    "classes",
    "domains",
    "image_size",
    "stride_first",
    "steps",
    "precision",
    "device",
    "aidgn",
    "torch",
)


@dataclass(frozen=True)
class Exported:
    """Result of `export`."""

    files: list[Path]
    check: OnnxCheck | None  # comparison of the ONNX file with the model; None without an ONNX file


def export(
    run: str | Path,
    out: str | Path | None = None,
    *,
    onnx: bool = True,
    data: str | Path | None = None,
    algorithm: str | None = None,
    address: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export a finished run as model.onnx, model.safetensors and MODEL_CARD.md.

    Args:
        run: Folder of the run or of `aidgn fit`.
        out: Folder for the files, by default RUN/export.
        onnx: Whether to write model.onnx.
        data: Folder of the run's images, if they have moved. Without images, the ONNX file is checked with generated
            ones and the card does not give their number.
        algorithm: path/to/file.py:Class of a custom algorithm.
        address: hf://user/name, for which the card becomes README.md with the Hub's front matter.
        on_progress: Receives a description of each step.
    """
    run = find_model(run)
    report = on_progress or (lambda _: None)
    source_file = RunFolder(run).model if run.is_dir() else run
    if source_file.suffix == ".safetensors" and source_file.is_file() and "run" in read_weights(source_file)[1]:
        raise AidgnError(
            f"{run} was made by `aidgn export` and is complete. To export again, give the folder of the run."
        )
    metadata = open_run(run).metadata
    model = load_model(run, "cpu", choose_custom_algorithm(metadata, algorithm))
    if onnx:
        check_exportable(model)
    folder = RunFolder(run).export if out is None else Path(out)
    if folder.exists() and not folder.is_dir():
        raise AidgnError(f"{folder} is a file: give --out a folder.")
    if folder.resolve() == run.resolve():
        raise AidgnError(
            f"--out {folder} is the folder of the run: the export would overwrite {source_file.name}. Choose another "
            "folder."
        )
    dataset = find_images_if_any(metadata, data)

    check = None
    files = []
    card = folder / ("MODEL_CARD.md" if address is None else "README.md")
    existed = folder.exists()
    try:
        if onnx:
            report("writing ONNX and comparing it with the model")
            check = write_onnx(model, metadata, folder / ONNX_FILE, dataset)
            files.append(folder / ONNX_FILE)
        report("writing safetensors and the model card")
        files.append(write_safetensors(RunFolder(run), RunFolder(folder).model))
        write_text(card, write_model_card(run, metadata, model, dataset, str(check) if check else None, address))
    except BaseException:
        if not existed:
            with suppress(OSError):  # the folder holds files
                folder.rmdir()
        raise
    return Exported([*files, card], check)


def push(run: str | Path, address: str, *, private: bool = False, **options: Any) -> str:
    """Export a finished run, upload the files to the Hugging Face Hub, and return the web address of the model.

    Args:
        run: Folder of the run or of `aidgn fit`.
        address: hf://user/name or user/name.
        private: Whether a new model is visible to its owner only.
        options: Further arguments of `export`.
    """
    address = hub.PREFIX + hub.parse(address)[0]
    hub.check_login(address)
    with temporary_folder("aidgn-push-") as folder:
        export(run, folder, address=address, **options)
        if on_progress := options.get("on_progress"):
            on_progress("uploading")
        return hub.upload(folder, address, private)


def export_ensemble(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    data: str | Path | None = None,
    algorithm: str | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Exported:
    """Export several finished runs as one model.onnx with the mean of their probabilities.

    Args:
        runs: Folders of the runs.
        out: Folder for the file.
        data: Folder of the first run's images, if they have moved. Without images the file is checked with generated
            ones.
        algorithm: path/to/file.py:Class of a custom algorithm.
        on_progress: Receives a description of each step.
    """
    report = on_progress or (lambda _: None)
    metadata = open_run(find_model(runs[0])).metadata
    model = load_model(list(runs), "cpu", algorithm)
    check_exportable(model)
    folder = RunFolder(out)
    if folder.path.is_file():
        raise AidgnError(f"{out} is a file: give --out a folder.")
    if folder.exists:
        raise AidgnError(f"--out {out} is the folder of a run. Choose another folder.")
    dataset = find_images_if_any(metadata, data)
    report(f"writing ONNX of {len(runs)} models and comparing it with their mean")
    check = write_onnx(model, metadata, folder.path / ONNX_FILE, dataset)
    return Exported([folder.path / ONNX_FILE], check)


def find_images_if_any(metadata: RunMetadata, data: str | Path | None) -> Dataset | None:
    """Call `find_training_images`; return None if it fails, unless `data` names the folder."""
    try:
        return find_training_images(metadata, data)
    except AidgnError:
        if data is not None:
            raise
        return None


def find_training_images(
    metadata: RunMetadata, data: str | Path | None, on_progress: Callable[[int, int], None] | None = None
) -> Dataset:
    """Find the data set of a run.

    Args:
        metadata: Metadata of the run.
        data: Folder of the images, if they have moved.
        on_progress: Called with the number of images compared and of all images.

    Raises:
        AidgnError: There are no images, or their names or contents are not those of the training.
    """
    dataset = find_dataset(metadata, data)
    if metadata.skipped:
        dataset = dataset.without(i for i, file in enumerate(dataset.files) if file in metadata.skipped)
    known = str(metadata.identity["data"])
    same_names = known.startswith(identify_images(dataset.fingerprint, ""))  # quick, so it is compared first
    if not same_names or known != identify_images(dataset.fingerprint, content_of(dataset, on_progress)):
        raise AidgnError(
            f"The images in {dataset.root or dataset.name} are not those that {metadata.path.parent} was trained on. "
            "Name the folder of the right images with --data DIR."
        )
    return dataset


def write_safetensors(run: RunFolder, path: Path) -> Path:
    """Write the weights of the selected step, and everything else that `load_model` needs, to one file."""
    tensors, metadata = read_model(run.model)
    values = run.metadata.to_dict()
    metadata["run"] = {key: values[key] for key in EXPORTED_METADATA}
    if run.novelty.exists():
        metadata["novelty"] = read_values(run.novelty)
    if run.expectations.exists():
        metadata["expectations"] = read_values(run.expectations)
    write_weights(path, tensors, metadata)
    return path
