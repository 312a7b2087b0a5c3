"""The model card: training data, accuracy on unseen domains and limits of a model. The template has the text."""

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS
from aidgn.data import DATASETS, Dataset
from aidgn.errors import AidgnError, short, some
from aidgn.escape import for_markdown, for_markdown_code, open_templates
from aidgn.inference.model import Model
from aidgn.inference.onnx_export import ONNX_FILE
from aidgn.runs import names
from aidgn.runs.folder import RunFolder
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.reader import read_runs
from aidgn.selection import select

# Runs that measure the accuracy of a model on unseen domains may differ from it in these parts of their identity.
FREE = ("target", "trial", "draw", "hyper_parameters", "precision", "evaluate_source_in", "augment_validation")


def write_model_card(
    run: Path,
    metadata: RunMetadata,
    model: Model,
    dataset: Dataset | None = None,
    onnx_check: str | None = None,
    address: str | None = None,
) -> str:
    """Write a model card in Markdown.

    Args:
        run: The folder of the run.
        metadata: Its metadata.
        model: Its model.
        dataset: The images of the run; without them the card does not give their number.
        onnx_check: Result of the comparison of the ONNX file with the model; None if there is no ONNX file.
        address: hf://user/name, for a card that begins with the Hub's front matter.
    """
    templates = open_templates(Path(__file__).parent, markdown=True)
    templates.filters |= {
        "code": lambda text: Markup(for_markdown_code(str(text))),
        "listed": lambda values, most=20: Markup(some(map(for_markdown, values), most)),
        "mean": np.mean,
        "percent": lambda share, digits=0: f"{share:.{digits}%}",
        "short": short,
        "verbatim": Markup,
    }
    identity = metadata.identity
    unseen = find_unseen_accuracies(run, metadata)
    text = templates.get_template("model_card.md.j2").render(
        run=metadata,
        identity={"train_only": None, "precision": None, "soup": None, "train_on_all": False} | identity,
        onnx_check=onnx_check,
        weights_file=address or names.MODEL,
        onnx_file=ONNX_FILE,
        counts=None if dataset is None else count_images(dataset),
        method=ALGORITHMS.get(metadata.label.name),
        unseen=unseen,
        unmeasured=[name for name in metadata.domains if name not in unseen],
        expected=estimate_accuracy(unseen),
        chance=f"Guessing at random gives {1 / len(metadata.classes):.1%}.",
        novelty=model.novelty,
        expectations=model.expectations,
        preprocessing=model.preprocessing,
        false_alarms=model.false_alarms,
        known_dataset=identity["dataset"] in DATASETS,
        backbone_licence=find_licence(identity["backbone"]),
    )
    front_matter = "" if address is None else write_front_matter(metadata, address, unseen)
    return front_matter + re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def write_front_matter(metadata: RunMetadata, address: str, unseen: dict[str, list[float]]) -> str:
    """Write the metadata of a card for the Hub: library, task, base model, and the accuracy on each unseen domain."""
    from huggingface_hub import EvalResult, ModelCardData

    identity = metadata.identity
    dataset = str(identity["dataset"])
    results = [
        EvalResult(
            task_type="image-classification",
            dataset_type=re.sub(r"[^\w.-]+", "-", dataset).lower(),
            dataset_name=f"{dataset}, unseen domain {name}",
            dataset_config=name,
            metric_type="accuracy",
            metric_name=f"Accuracy on the unseen domain {name}",
            metric_value=round(float(np.mean(values)), 4),
        )
        for name, values in unseen.items()
    ]
    data = ModelCardData(
        library_name="aidgn",
        pipeline_tag="image-classification",
        tags=["image-classification", "domain-generalization", str(metadata.label.name)],
        base_model=find_base_model(identity),
        model_name=address.rpartition("/")[2],
        eval_results=results or None,
    )
    return f"---\n{data.to_yaml()}\n---\n\n"


def find_base_model(identity: dict[str, Any]) -> str | None:
    """Return the name on the Hub of the published weights that training began with, or None."""
    backbone = str(identity["backbone"])
    if identity["weights"] != "hub" or backbone.startswith((backbones.SMALL, backbones.TORCHVISION)):
        return None
    return f"timm/{backbone}"


def count_images(dataset: Dataset) -> list[dict[str, Any]]:
    """Count the images of each domain, and of its rarest and most common class."""
    counts = []
    for number, name in enumerate(dataset.domains):
        per_class = np.bincount(dataset.labels[dataset.indices(number)], minlength=len(dataset.classes))
        rarest, commonest = int(per_class.argmin()), int(per_class.argmax())
        counts.append(
            {
                "name": name,
                "total": int(per_class.sum()),
                "rarest": dataset.classes[rarest],
                "least": int(per_class[rarest]),
                "commonest": dataset.classes[commonest],
                "most": int(per_class[commonest]),
            }
        )
    return counts


def find_unseen_accuracies(run: Path, metadata: RunMetadata) -> dict[str, list[float]]:
    """Collect the accuracies on each domain when it was left out, one per trial.

    They come from finished runs with the same settings, up to `FREE`: the run itself, runs in the folder around it, and
    runs in `runs` next to it, where `aidgn fit` puts them.
    """

    def settings(identity: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in identity.items() if key not in FREE}

    comparable = []
    for other in RunFolder.find(run.parent, "*", "runs/*"):
        with suppress(AidgnError):  # a folder of something else
            if other.identity["target"] and settings(other.identity) == settings(metadata.identity):
                comparable.append(other.path)
    try:
        rows = select(read_runs(*comparable).finished(), "training") if comparable else []
    except AidgnError:
        return {}
    accuracies: dict[str, list[float]] = {name: [] for name in metadata.domains}
    for row in rows:
        accuracies[metadata.domains[row["target"]]].append(row["accuracy"])
    return {name: values for name, values in accuracies.items() if values}


def estimate_accuracy(unseen: dict[str, list[float]]) -> dict[str, Any] | None:
    """Estimate the accuracy on a new domain from two or more unseen ones."""
    if len(unseen) < 2:
        return None
    means = {name: float(np.mean(values)) for name, values in unseen.items()}
    worst = min(means, key=lambda name: means[name])
    values = list(means.values())
    return {
        "mean": np.mean(values),
        "worst": means[worst],
        "worst_name": worst,
        "spread": np.std(values, ddof=1),
    }


def find_licence(backbone: str) -> str | None:
    """Return the licence of a network's published weights, if timm knows it."""
    if backbone.startswith((backbones.SMALL, backbones.TORCHVISION)):
        return None
    import timm

    config = timm.get_pretrained_cfg(backbone, allow_unregistered=True)
    return config.license if config else None
