"""Tables of test-time adaptation, from the adaptation.jsonl of runs: every algorithm as trained and as adapted."""

import csv
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aidgn.errors import AidgnError, some
from aidgn.files import atomic_write
from aidgn.report.export import to_parquet
from aidgn.report.paper import dataset_order, paper_notes, paper_order
from aidgn.report.table import SPREADS, benchmark_table, caption, column_names, dataset_table, in_order, missing_runs
from aidgn.report.table_formats import Table
from aidgn.runs.differences import check_same_images, differences
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import ADAPTED, read_adaptation
from aidgn.runs.records import RunRecords
from aidgn.selection import choose, read_runs

ORDER = ("none", "T3A", "Tent-BN", "Tent-C", "Tent")  # as in the paper

Line = dict[str, Any]


def adaptation_tables(
    lines: Sequence[Line], spread: str = "sd", paper: bool = False, notes: Sequence[str] = ()
) -> list[Table]:
    """One table per data set (algorithms and methods x targets) and, of several data sets, one over them.

    An accuracy is that of the setting which source validation data chose."""
    if spread not in SPREADS:
        raise AidgnError(f"There is no spread {spread}. Choose sd or se.")
    results: dict[tuple[str, str], dict[int, dict[int, float]]] = {}
    heads: dict[str, tuple[list[str], list[str]]] = {}
    chosen = [line for line in lines if line["selected"] and len(line["target"]) == 1]
    for dataset in in_order({line["dataset"] for line in chosen}, dataset_order()):
        of = [line for line in chosen if line["dataset"] == dataset]
        names = {tuple(line.get("domains") or ()) for line in of} - {()}
        known = list(next(iter(names))) if len(names) == 1 else sorted({line["target"][0] for line in of})
        heads[dataset] = column_names(dataset, names or [known], len(known))
        for line in of:
            trials = results.setdefault((dataset, label(line)), {}).setdefault(known.index(line["target"][0]), {})
            trials[line["trial"]] = line["target_accuracy"]
    rows = {(line["algorithm"], line["method"]): label(line) for line in chosen}
    algorithms = in_order({algorithm for algorithm, _ in rows}, paper_order())
    order = [rows[algorithm, method] for algorithm in algorithms for method in ORDER if (algorithm, method) in rows]
    made = []
    for dataset, (columns, about) in heads.items():
        present = [name for name in order if (dataset, name) in results]
        title = f"{dataset}, test-time adaptation"
        made.append(dataset_table(title, dataset, columns, present, results, spread, paper))
        made[-1].notes += about
    if len(heads) > 1:
        made.append(benchmark_table("All data sets, test-time adaptation", list(heads), order, results, spread, paper))
    for table in made:
        theirs = paper_notes(table.rows, "training") if paper else []
        table.notes = [
            caption(table, spread),
            *table.notes,
            "Runs chosen by training-domain validation, settings of a "
            "method by accuracy on source validation data; the target's labels choose nothing.",
            *theirs,
            *notes,
        ]
    return made


def label(line: Line) -> str:
    return line["algorithm"] if line["method"] == "none" else f"{line['algorithm']} + {line['method']}"


def comparable(lines: Sequence[Line]) -> list[Line]:
    """The chosen settings, for (data set, target, trial) where every algorithm and method has one, so that averages are
    over the same; [] where there is nothing to compare."""
    found: dict[tuple[str, str], dict[tuple[str, str, int], Line]] = {}
    for line in lines:
        if line["selected"] and len(line["target"]) == 1:
            place = line["dataset"], line["target"][0], line["trial"]
            found.setdefault((line["algorithm"], line["method"]), {})[place] = line
    common = set.intersection(*(set(places) for places in found.values())) if len(found) > 1 else set()
    return [line for places in found.values() for place, line in places.items() if place in common]


# Reading --------------------------------------------------------------------------------------------------------------


def load_adaptation(folders: Sequence[str | Path]) -> tuple[list[Line], list[str]]:
    """The lines of the runs that `chosen_runs` gives, each with the names of its data set's domains; and notes."""
    runs, notes = chosen_runs(folders, adapted=True)
    lines: list[Line] = []
    without = []
    for run in runs:
        found = read_lines(run) if RunFolder(run).adaptation.is_file() else []
        lines += found
        without += [] if found else [run]
    if not lines:
        raise AidgnError(
            f"None of the {len(runs)} runs in {', '.join(map(str, folders))} has been adapted. "
            f"`aidgn adapt {shlex.join(map(str, folders))}` does that."
        )
    if without:
        notes.append(f"Not adapted yet: {len(without)} runs ({some(without)}). `aidgn adapt` does that.")
    return lines, notes


def read_lines(run: Path) -> list[Line]:
    """What was measured with the weights that the run has; with any, where it has none any more."""
    folder = RunFolder(run)
    model = folder.model_digest if folder.model.is_file() else None
    return [{**line, "domains": folder.metadata.domains} for line in read_adaptation(run, model)]


def write_lines(lines: Sequence[Line], path: Path) -> None:
    """All lines as CSV, or Parquet where the name of the file ends in .parquet."""
    settings = dict.fromkeys(key for line in lines for key in line["settings"])
    keys = [key for key in ADAPTED if key not in ("settings", "model")]
    with atomic_write(path) as temporary:
        with temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*keys, *(f"settings.{key}" for key in settings)])
            writer.writerows(
                [
                    *("+".join(line[key]) if key == "target" else line[key] for key in keys),
                    *(line["settings"].get(key) for key in settings),
                ]
                for line in lines
            )
        if path.suffix == ".parquet":
            to_parquet(temporary)


def chosen_runs(folders: Sequence[str | Path], adapted: bool = False) -> tuple[list[Path], list[str]]:
    """Folders of runs as they are; below others, of each (data set, algorithm, target, trial) the run that
    training-domain validation chooses, if it has its model or, with `adapted`, results of an adaptation. And what is
    missing, in words."""
    runs = [Path(folder) for folder in folders if RunFolder(folder).exists]
    sweeps = [folder for folder in folders if Path(folder) not in runs]
    notes: list[str] = []
    places: dict[tuple[str, str, str, int], RunRecords] = {}

    def take(run: RunRecords) -> None:
        name = str(run.label.without_version())  # lines of different versions have one name
        other = places.setdefault((run.args["dataset"], name, str(run.targets), run.args["trial_seed"]), run)
        if str(other) != str(run):
            raise AidgnError(
                f"{other} and {run} are runs of the same algorithm, unseen domain and trial: tables have "
                "one place for both. Give one of them."
            )

    for run in read_runs(*runs).runs if runs and len(folders) > 1 else ():
        take(run)
    if sweeps:
        found = read_runs(*sweeps)
        if found.unfinished:
            notes.append(
                f"Unfinished runs left out: {len(found.unfinished)}; the command that started them "
                f"goes on with them: {some(found.unfinished)}."
            )
        groups: dict[tuple[str, str, int, int], list[RunRecords]] = {}
        for run in found.finished().runs:
            if len(run.targets) == 1:
                key = run.args["dataset"], run.args["algorithm"], run.targets[0], run.args["trial_seed"]
                groups.setdefault(key, []).append(run)
        without = []
        for algorithm in {key[:2] for key in groups}:
            check_same_images(run for key, members in groups.items() if key[:2] == algorithm for run in members)
        for key, members in sorted(groups.items(), key=lambda group: group[0]):
            best = choose(key[2], members)
            folder = RunFolder(best.run.path.parent) if best and best.run.path else None
            if best and folder and (folder.model.is_file() or (adapted and folder.adaptation.is_file())):
                take(best.run)
                runs.append(folder.path)
            elif best:
                without.append(str(best.run))
        if without:
            notes.append(f"{len(without)} runs have records but no model, so they cannot be adapted: {some(without)}.")
        notes += missing_runs(found.finished().runs)
        if not runs:
            raise AidgnError(
                "\n".join(
                    [
                        f"There is no finished run with one unseen domain and its model in "
                        f"{', '.join(map(str, sweeps))}.",
                        *notes,
                    ]
                )
            )
    notes += map(str, differences(places.values()))
    return list(dict.fromkeys(runs)), notes
