"""Compare promise and truth: each domain in turn is a new site that `fit` never saw, and `evaluate` measures there.

    python experiments/new_site.py digits --out runs/new-site-digits
    python experiments/new_site.py PACS --data-dir data --weights resnet50.safetensors --steps 1000 --trials 2 \\
        --device cuda --workers 4 --out runs/new-site-pacs

For each domain, `fit` is given the other domains alone: it leaves each of them out in turn, chooses between the
algorithm and ERM, and trains the model on all of them. Then the model classifies the domain, whose labels choose
nothing. The same command continues an interrupted experiment. OUT/results.json has every figure, OUT/results.md the
table. On one GPU, several processes need NVIDIA's MPS to run at the same time: `nvidia-cuda-mps-control -d`.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from aidgn.data import Dataset, load_dataset
from aidgn.evaluation import Evaluation, LabelledPictures, evaluate
from aidgn.files import for_json, write_text
from aidgn.fitting import FitResult, fit
from aidgn.fitting.store import describe_new_site
from aidgn.new_site.expectations import METHODS

COLUMNS = (
    "new site",
    "model",
    "promised",
    "nine in ten",
    "true",
    "inside",
    "ECE before",
    "ECE after",
    "AUROC",
    "surest 80 %: promised, true",
    "warned",
    "wrong of warned",
    "distance",
    "largest left out",
    "alarm",
    "predicted",
    "off by",
)


def make_folders(dataset: Dataset, out: Path) -> Path:
    """Return a folder with a folder for each domain; images held in memory are written there."""
    if dataset.root is not None:
        return dataset.root.resolve()
    assert dataset.pixels is not None
    root = out / "images"
    for index, (domain, label) in enumerate(zip(dataset.domain_of, dataset.labels, strict=True)):
        path = root / dataset.domains[domain] / dataset.classes[label] / f"{index}.png"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(dataset.pixels[index]).save(path)
    return root.resolve()


def folder_of(dataset: Dataset, root: Path, domain: int) -> Path:
    """Return the folder of a domain; its name may be written in another way than the domain's."""
    if dataset.root is None:
        return root / dataset.domains[domain]
    return root / dataset.files[dataset.indices(domain)[0]].partition("/")[0]


def link_sources(dataset: Dataset, root: Path, unseen: int, place: Path) -> Path:
    """Make a folder with links to all domains but one."""
    place.mkdir(parents=True, exist_ok=True)
    for domain in range(len(dataset.domains)):
        link = place / dataset.domains[domain]
        if domain != unseen and not link.is_symlink():
            link.symlink_to(folder_of(dataset, root, domain))
    return place


def label_site(dataset: Dataset, root: Path, domain: int) -> LabelledPictures:
    """Return the pictures of a domain with their labels."""
    indices = dataset.indices(domain)
    if dataset.root is None:
        name = dataset.domains[domain]
        files = [str(root / name / dataset.classes[dataset.labels[i]] / f"{i}.png") for i in indices]
    else:
        files = [str(root / dataset.files[i]) for i in indices]
    return LabelledPictures(dataset.domains[domain], files, np.asarray(dataset.labels[indices]), [])


def row_of(algorithm: str, result: FitResult, found: Evaluation) -> dict[str, Any]:
    """Put promise and truth side by side."""
    expectations = result.expectations
    assert expectations is not None and found.comparison is not None and found.site_report is not None
    interval, alarm = found.comparison.interval, found.site_report
    return {
        "site": found.site,
        "algorithm": algorithm,
        "model": str(result.final.label()),
        "steps": result.final.steps,
        "promise": describe_new_site(expectations),
        "truth": found.to_dict(),
        "inside": None if interval is None else interval.low <= found.scores.accuracy <= interval.high,
        "predicted": {name: expectations.predict_accuracy(alarm.mean_chance, name) for name in METHODS},
    }


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rows as a Markdown table."""

    def percent(value: float | None, digits: int = 1) -> str:
        return "-" if value is None else f"{value:.{digits}%}"

    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in rows:
        truth, comparison, alarm = row["truth"], row["truth"]["comparison"], row["truth"]["site_alarm"]
        interval, found = comparison["interval"], alarm["comparison"]
        cells = [
            row["site"],
            row["model"],
            percent(comparison["promised"]),
            "-" if interval is None else f"{percent(interval['low'], 0)} to {percent(interval['high'], 0)}",
            percent(truth["accuracy"]),
            "-" if row["inside"] is None else ("yes" if row["inside"] else "no"),
            percent(truth["ece_before"]),
            percent(truth["ece"]),
            "-" if truth["auroc"] is None else f"{truth['auroc']:.3f}",
            f"{percent(truth['promised_surest']['0.8'])}, {percent(truth['surest']['0.8'])}",
            percent(truth["warned"]),
            percent(truth["warned_wrong"]),
            f"{found['ratio']:.2f}",
            f"{found['farthest']:.2f}",
            "yes" if alarm["alarm"] else "no",
            percent(alarm["predicted"]),
            f"{100 * abs(alarm['predicted'] - truth['accuracy']):.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of earlier calls with the same --out, which this call replaces or adds to."""
    return json.loads(path.read_text()) if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="name of a data set, or a folder ROOT/<domain>/<class>/<image>")
    parser.add_argument("--out", type=Path, required=True, help="folder for fits and results")
    parser.add_argument("--algorithm", action="append", help="to compare with ERM; repeatable  [default: AIDGN]")
    parser.add_argument("--site", action="append", help="a domain to be the new site; repeatable  [default: each]")
    parser.add_argument("--steps", type=int, help="steps of each run  [default: by the number of images]")
    parser.add_argument("--trials", type=int, default=1, help="how often `fit` leaves each site out")
    parser.add_argument("--weights", help="file of initial weights, hub or none")
    parser.add_argument("--backbone", help="network")
    parser.add_argument("--average", help="sma, swad or none")
    parser.add_argument("--quick", action="store_true", help="as `aidgn fit --quick`")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1 or cpu")
    parser.add_argument("--workers", type=int, help="runs that are trained at a time")
    parser.add_argument("--data-dir", help="folder with the data sets")
    options = parser.parse_args()

    settings = {name: getattr(options, name) for name in ("steps", "weights", "backbone", "average")}
    settings = {name: value for name, value in settings.items() if value is not None}
    if settings.get("weights") not in (None, "hub", "none"):
        settings["weights"] = str(Path(settings["weights"]).resolve())
    dataset = load_dataset(options.dataset, options.data_dir)
    root = make_folders(dataset, options.out)
    chosen = [dataset.find_domain(name) for name in options.site] if options.site else range(len(dataset.domains))
    rows = read_rows(options.out / "results.json")
    for algorithm in options.algorithm or ["AIDGN"]:
        for number in chosen:
            site = dataset.domains[number]
            print(f"== {algorithm}: {site} is the new site", flush=True)
            sources = link_sources(dataset, root, number, options.out / f"without-{site}")
            result = fit(
                sources,
                algorithm=algorithm,
                quick=options.quick,
                trials=options.trials,
                out=options.out / f"fit-{algorithm}-without-{site}",
                device=options.device,
                workers=options.workers,
                report=False,
                on_message=lambda sentence: print(sentence, flush=True),
                **settings,
            )
            found = evaluate(result.model, label_site(dataset, root, number), str(result.model_folder))
            for sentence in found.sentences():
                print(sentence, flush=True)
            rows = [row for row in rows if (row["algorithm"], row["site"]) != (algorithm, site)]
            rows.append(for_json(row_of(algorithm, result, found)))
            write_text(options.out / "results.json", json.dumps(rows, indent=1) + "\n")
            write_text(options.out / "results.md", table_of(rows))
    print(table_of(rows))


if __name__ == "__main__":
    main()
