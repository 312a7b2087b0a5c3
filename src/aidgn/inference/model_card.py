"""The model card: what a model was trained on, how it did on domains it had not seen, and what not to expect of it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS
from aidgn.data import DATASETS, Dataset
from aidgn.errors import AidgnError, short, some
from aidgn.inference.model import Model
from aidgn.report.table_formats import markdown
from aidgn.runs.folder import RunFolder
from aidgn.runs.label import Label
from aidgn.selection import read_runs, select

# What may differ between a model and the runs that tell how it does on unseen domains.
FREE = ("target", "trial", "draw", "hyper_parameters", "precision", "evaluate_source_in", "augment_validation")


def model_card(run: Path, about: dict[str, Any], model: Model, dataset: Dataset | None, check: str | None) -> str:
    """Markdown. `check` says how the ONNX file was compared with the model; None: there is none."""
    identity = about["identity"]
    sources = [name for name in about["domains"] if name not in identity["target"]]
    parts = [
        f"# {markdown(identity['dataset'])} classifier ({markdown(identity['algorithm'])})",
        summary(about, sources),
        "## How to use it",
        loading(run, check),
        "## Training data",
        data_section(about, sources, dataset),
        "## How it was trained",
        training(about),
        "## Accuracy on domains it has not seen",
        accuracy_section(run, about, model.classes),
        "## Warnings",
        warnings_section(model),
        "## Limits",
        limits(about, sources),
        "## Licence",
        licence(identity),
    ]
    return "\n\n".join(parts) + "\n"


def summary(about: dict[str, Any], sources: list[str]) -> str:
    identity = about["identity"]
    return (
        f"Tells apart {len(about['classes'])} classes in pictures of {about['image_size']} x {about['image_size']} "
        f"pixels. {identity['algorithm']} with backbone `{identity['backbone']}`, trained with aidgn "
        f"{about.get('aidgn', '')} on the domains {listed(sources)}"
        + (f"; {listed(identity['target'])} was kept unseen." if identity["target"] else ".")
        + f"\n\nClasses: {listed(about['classes'], 60)}."
    )


def loading(run: Path, check: str | None) -> str:
    own = "With aidgn: label, probabilities, and a warning when a picture is unlike the training images.\n\n" + fenced(
        "from aidgn.inference.model import load_model",
        'model = load_model("model.safetensors")',
        'found = model.predict(["photo.jpg"])',
        "print(found.labels[0], found.probabilities[0].max(), found.warnings)",
    )
    if check is None:
        return own + "\n\nThere is no ONNX file of this model."
    return (
        own + "\n\nWith onnxruntime alone. The graph takes 8-bit RGB pictures of any size, upright as a viewer "
        "shows them and with white behind what is transparent, and resizes and normalises them itself; it gives "
        "`logits` and `probabilities`. Grey pictures of 16 bits must be scaled to 8 first.\n\n"
        + fenced(
            "import json, numpy, onnxruntime, PIL.Image, PIL.ImageOps",
            'session = onnxruntime.InferenceSession("model.onnx")',
            'classes = json.loads(session.get_modelmeta().custom_metadata_map["classes"])',
            'picture = PIL.ImageOps.exif_transpose(PIL.Image.open("photo.jpg")).convert("RGBA")',
            'white = PIL.Image.new("RGBA", picture.size, "white")',
            'picture = PIL.Image.alpha_composite(white, picture).convert("RGB")',
            'probabilities = session.run(["probabilities"], {"images": numpy.asarray(picture)[None]})[0][0]',
            "print(classes[probabilities.argmax()], probabilities.max())",
        )
        + f"\n\nChecked when it was exported: {check}. aidgn decodes large JPEG files at a fraction of their size "
        "and shrinks sides beyond six times the input in two passes; there logits may differ by some hundredths of "
        "the largest. Warnings are not part of the ONNX file."
    )


def data_section(about: dict[str, Any], sources: list[str], dataset: Dataset | None) -> str:
    identity = about["identity"]
    text = f"Data set: {markdown(identity['dataset'])} (fingerprint `{identity['data'][:16]}`)."
    if about.get("skipped"):
        text += f" {len(about['skipped'])} broken files were left out."
    if dataset is None:
        return text + " The images were not at hand when this card was written; their numbers are not given."
    rows = []
    for number, name in enumerate(dataset.domains):
        per_class = np.bincount(dataset.labels[dataset.indices(number)], minlength=len(dataset.classes))
        few, many = int(per_class.argmin()), int(per_class.argmax())
        each = f"{per_class[few]:,} ({dataset.classes[few]}) to {per_class[many]:,} ({dataset.classes[many]})"
        rows.append(
            [
                name,
                "training" if name in sources else "unseen",
                f"{per_class.sum():,}",
                each if per_class[few] < per_class[many] else f"{per_class[few]:,}",
            ]
        )
    return text + "\n\n" + table(["Domain", "Use", "DeviceImageStore", "Per class"], rows)


def training(about: dict[str, Any]) -> str:
    identity = about["identity"]
    kind = ALGORITHMS.get(Label.parse(identity["algorithm"]).name)
    method = f"{kind.title} ({kind.paper})" if kind else "an algorithm of the author's own"
    start = {"none": "random numbers", "hub": f"the published weights of `{identity['backbone']}`"}.get(
        identity["weights"], f"the weights `{identity['weights']}`"
    )
    part = " Only the network's last stage and the classifier were trained." if identity.get("train_only") else ""
    values = ", ".join(f"{name} {short(value)}" for name, value in identity["hyper_parameters"].items())
    return (
        f"- Method: {identity['algorithm']}: {method}.\n"
        f"- Initial weights: {start}.{part}\n"
        f"- {identity['steps']:,} steps; hyper-parameters of draw {identity['draw']}: {values}.\n"
        "- Protocol: a fifth of the images of every training domain was set aside; of the evaluations, every "
        f"{identity['eval_every']} steps, the weights with the highest mean accuracy on these were taken. Images "
        "of an unseen domain took no part in training or selection.\n"
        f"- Arithmetic: {about.get('precision', identity.get('precision', 'float32'))}; seed of splits and "
        f"batches: trial {identity['trial']}."
    )


def accuracy_section(run: Path, about: dict[str, Any], classes: list[str]) -> str:
    unseen = unseen_accuracies(run, about)
    chance = f"Guessing at random gives {1 / len(classes):.1%}."
    if not unseen:
        return (
            "Not measured: no run beside this one left a domain out with the same settings. `aidgn fit` or "
            f"`aidgn sweep` measures it. The accuracy on images set aside from the training domains says little "
            f"about a new domain. {chance}"
        )
    means = {name: float(np.mean(values)) for name, values in unseen.items()}
    rows = [[name, f"{means[name]:.1%}", str(len(values))] for name, values in unseen.items()]
    text = (
        "Each domain was left out of a training in turn, with these settings; the model was chosen by accuracy on "
        "images of the other domains alone.\n\n" + table(["Unseen domain", "Accuracy", "Runs"], rows)
    )
    missing = [name for name in about["domains"] if name not in unseen]
    if missing:
        text += f"\n\nNot measured with {listed(missing)} unseen."
    worst = min(means, key=lambda name: means[name])
    if len(means) < 2:
        return f"{text}\n\nOne domain says little about the next: take it as an example, not as an estimate. {chance}"
    return (
        f"{text}\n\n**Expect about {np.mean(list(means.values())):.0%} on a new domain, and {means[worst]:.0%} if "
        f"it is as far from the others as {markdown(worst)} is.** The standard deviation over domains is "
        f"{np.std(list(means.values()), ddof=1):.1%}. {chance}"
    )


def unseen_accuracies(run: Path, about: dict[str, Any]) -> dict[str, list[float]]:
    """Accuracy on each domain when it was left out, once per trial: of this run and of those in the folder around it,
    or in `runs` beside it (`aidgn fit`), that are finished and differ at most in what is left out, trial and draw."""
    ours = {key: value for key, value in about["identity"].items() if key not in FREE}
    alike = []
    for other in RunFolder.find(run.parent, "*", "runs/*"):
        with suppress(AidgnError):  # a folder of something else
            theirs = {key: value for key, value in other.identity.items() if key not in FREE}
            if theirs == ours and other.identity["target"]:
                alike.append(other.path)
    try:
        rows = select(read_runs(*alike).finished(), "training") if alike else []
    except AidgnError:
        return {}
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(about["domains"][row["target"]], []).append(row["accuracy"])
    return {name: found[name] for name in about["domains"] if name in found}


def warnings_section(model: Model) -> str:
    if model.novelty is None:
        return "This model gives no warnings: it does not know what is usual for its training images."
    return (
        f"aidgn warns of a picture whose feature is unlike those of {len(model.novelty):,} images that were set "
        "aside from the training domains, by norm"
        + (" and angle" if model.novelty.weight is not None else "")
        + f". Of new pictures of the training domains {model.novelty.rate(model.false_alarms):.1%} get a false "
        "alarm. Pictures of a new domain are unlike them by nature, so that more get one; no warning is no promise "
        "that the label is right."
    )


def limits(about: dict[str, Any], sources: list[str]) -> str:
    return (
        f"- It answers with one of its {len(about['classes'])} classes, whatever the picture shows.\n"
        f"- Probabilities are those on pictures like the training images ({listed(sources)}); on a new domain they "
        "are too high.\n"
        f"- Pictures are resized to {about['image_size']} x {about['image_size']} pixels whatever their shape: "
        "small objects in large pictures are lost.\n"
        "- A new domain can be harder than any that was left out. Label a hundred of its pictures and measure.\n"
        "- Not made, and not tested, for decisions about people."
    )


def licence(identity: dict[str, Any]) -> str:
    text = "aidgn, the program, is under the MIT licence. What may be done with the weights depends on the images" + (
        f" of {identity['dataset']}, whose terms are those of its publishers,"
        if identity["dataset"] in DATASETS
        else ", whose owner knows the terms,"
    )
    if identity["weights"] == "none":
        return text + " alone: training began with random numbers."
    terms = None
    if not identity["backbone"].startswith((backbones.SMALL, backbones.TORCHVISION)):
        import timm

        known = timm.get_pretrained_cfg(identity["backbone"], allow_unregistered=True)
        terms = known.license if known else None
    return text + (
        f" and on the initial weights of `{identity['backbone']}`"
        + (f" (licence: {terms})" if terms else "")
        + ", and on the images these were made from."
    )


def listed(names: list[str], most: int = 20) -> str:
    return some(map(markdown, names), most)


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *([markdown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fenced(*lines: str) -> str:
    return "\n".join(["```python", *lines, "```"])
