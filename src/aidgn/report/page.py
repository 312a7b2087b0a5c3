"""The report: one HTML file with everything about runs, that needs no network and no other file."""

import base64
import hashlib
import json
import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import aidgn
from aidgn.data.registry import DATASETS
from aidgn.errors import AidgnError, some
from aidgn.files import for_json, write_text
from aidgn.report import reproduce as rerun
from aidgn.report.page_data import (
    MANY_RUNS,
    adaptation,
    bars,
    curves,
    drop_untargeted,
    names_of,
    place,
    representatives,
    search,
    with_paper,
)
from aidgn.report.paper import dataset_order, paper_order
from aidgn.report.table import Trials, average_over_targets, have_same_trials, in_order, tables
from aidgn.report.table_formats import RowName, Table
from aidgn.runs.folder import RunFolder
from aidgn.runs.packed import SUFFIX as PACKED
from aidgn.runs.records import Records
from aidgn.selection import METHODS, read_runs, select

log = logging.getLogger("aidgn")

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

POINTS = 2000  # images in the latent space, of `aidgn report` too

Progress = Callable[[str, int, int], None]  # what is done, how many, of how many


@dataclass
class Result:
    """The tables by one way of selecting, and the accuracies behind them."""

    method: str
    tables: list[Table]
    paper_notes: list[list[str]]  # per table, [] where the paper has no numbers for it
    accuracies: dict[str, dict[RowName, Trials]]  # by data set
    answers: dict[str, str] = field(default_factory=dict)  # by data set

    @property
    def short_title(self) -> str:
        return METHODS[self.method].short_title

    @property
    def title(self) -> str:
        return METHODS[self.method].title

    @property
    def words(self) -> str:
        return METHODS[self.method].description


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    *,
    data: str | Path | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    algorithm: str | Sequence[str] | None = None,
    points: int = POINTS,
    permutations: int = 999,
    on_progress: Progress | None = None,
) -> Path:
    """Write the report of the runs below the folders to the file `out`. What cannot be shown is said in it.

    The latent space is shown for one run per algorithm and target, with up to `points` images of each data set; its
    diagnosis rests on so many permutations. `algorithm` is path/to/file.py:Class where runs are of an own one,
    or several."""
    from aidgn.report.latent_view import look_inside

    records = read_runs(*folders)
    if not records.runs:
        raise AidgnError(f"There is nothing to report: the runs in {', '.join(map(str, folders))} have no record yet.")
    finished = records.finished()
    orders = dataset_order(), paper_order()
    names = [
        in_order({run.args[key] for run in records.runs}, order)
        for key, order in zip(("dataset", "algorithm"), orders, strict=True)
    ]
    for these in (records, finished):
        these.runs.sort(
            key=lambda run: (
                names[0].index(run.args["dataset"]),
                names[1].index(run.args["algorithm"]),
                run.targets,
                run.args["trial_seed"],
                run.args["hparams_seed"],
            )
        )
    results, notes = _results(records, finished)
    latent = look_inside(
        [run.path.parent for run in representatives(finished) if run.path],
        data=data,
        data_dir=data_dir,
        device=device,
        algorithm=algorithm,
        points=points,
        permutations=permutations,
        on_progress=on_progress,
    )
    if latent.notes:
        log.warning("The page cannot show everything: %s", some(latent.notes, 1))
    chosen = {
        method: {place(row): row for row in select(finished, method)}
        for method in [result.method for result in results]
    }
    adapted, adaptation_paper, adaptation_notes = adaptation(finished)
    places: dict[str, list[Path]] = {}
    given: dict[str, None] = {}  # the folders as the commands that are shown make them
    for folder in map(Path, folders):
        name = _place_name(folder)
        places.setdefault(name, []).append(folder)
        given[str(Path(name, rerun.folder(folder)))] = None
    payload = {
        "datasets": _datasets(records),
        "letters": _letters(results),
        "bars": {
            result.method: [
                bars(table, records, result.accuracies.get(table.dataset or "", {})) for table in result.tables
            ]
            for result in results
        },
        "runs": curves(records, chosen),
        "search": search(finished),
        "adaptation": [bars(table, finished, {}) for table in adapted],
        "points": latent.points,
        "views": latent.views,
    }
    text = _render(
        payload,
        latent.sheets,
        title=_title(records),
        datasets=payload["datasets"],
        results=results,
        notes=notes,
        question=_question(records),
        facts=_facts(records, finished),
        views=latent.views,
        told=latent.told,
        latent_notes=latent.notes,
        adaptation=adapted,
        adaptation_paper=adaptation_paper,
        adaptation_notes=adaptation_notes,
        many=len(records.runs) > MANY_RUNS,
        commands=[
            line
            for name, members in places.items()
            for line in rerun.commands(
                [run for run in records.runs if run.path and any(map(Path(str(run.path)).is_relative_to, members))],
                name,
            )
        ],
        again=_again(list(given), adapted, algorithm, points),
        versions=rerun.versions(records.runs),
        hyper_parameters=rerun.hyper_parameters(records.runs),
        unfinished=_unfinished(records),
        letters=payload["letters"],
    )
    write_text(out, text)
    return out


def _render(payload: Mapping[str, Any], sheets: Sequence[str], **context: Any) -> str:
    """The page. Text is escaped by the template; scripts other than ours are refused by the page's own policy."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    script, style = ((here / name).read_text(encoding="utf-8").strip() for name in ("page.js.j2", "page.css.j2"))
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["breakable"] = lambda name: Markup("<wbr>").join(
        re.findall(r"[^\s_./-]{0,11}[\s_./-]|[^\s_./-]{1,12}", name)
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.j2").render(
        **context,
        payload=as_json(payload),
        sheets=list(sheets),
        script=script,
        style=style,
        digest=digest,
        today=date.today().isoformat(),
        version=aidgn.__version__,
    )


def as_json(value: Any) -> str:
    """JSON that can stand in a <script> element, whatever names users chose; null for what is no finite number."""
    text = json.dumps(for_json(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# What the runs are ----------------------------------------------------------------------------------------------------


def _place_name(folder: str | Path) -> str:
    """The folder that runs are in, as it was given; of a path from the root the last part, as those above it are
    nobody's business."""
    path = Path(folder)
    if path.is_file():
        path = path.with_suffix("") if path.suffix == PACKED else path.parent
    if RunFolder(path).exists:
        path = (path.resolve() if path.name in ("", "..") else path).parent
    return path.resolve().name if path.is_absolute() or path.name in ("", "..") else str(path)


def _again(
    folders: Sequence[str], adapted: Sequence[Table], algorithm: str | Sequence[str] | None, points: int
) -> list[str]:
    """The commands that make the page of the runs."""
    from aidgn.adaptation.methods import DEFAULT

    methods = {row.name.adaptation for table in adapted for row in table.rows if row.name} - {"none"}
    chosen = [part for name in sorted(methods) for part in ("--method", name.lower())] if methods != {*DEFAULT} else []
    own = [
        part
        for name in ([algorithm] if isinstance(algorithm, str) else algorithm or ())
        for part in ("--algorithm", f"path/to/file.py:{name.rpartition(':')[2]}")
    ]
    adapt = [["aidgn", "adapt", *folders, *chosen, *own]] if methods else []
    shown = ["--points", str(points)] if points != POINTS else []
    return [shlex.join(command) for command in (*adapt, ["aidgn", "report", *folders, *own, *shown])]


def _datasets(records: Records) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for run in records.runs:
        entry = found.setdefault(
            run.args["dataset"], {"name": run.args["dataset"], "domains": names_of(run), "algorithms": []}
        )
        if run.args["algorithm"] not in entry["algorithms"]:
            entry["algorithms"].append(run.args["algorithm"])
    return list(found.values())


def _letters(results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Per data set, the names of the domains that letters stand for in its table."""
    return {
        name: dict(zip(entry.letters, entry.domains, strict=True))
        for name, entry in DATASETS.items()
        for result in results[:1]
        for table in result.tables
        if table.dataset == name and {*table.columns} - {"Avg"} <= {*entry.letters} and entry.letters != entry.domains
    }


def _listed(names: Sequence[str], most: int = 4) -> str:
    """'a, b and c'"""
    names = [*names[:most], f"{_count(len(names) - most)} more"] if len(names) > most + 1 else list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _count(number: int) -> str:
    return COUNTS[number] if number < len(COUNTS) else str(number)


def _trials(number: int) -> str:
    return f"{_count(number)} trial" + "s" * (number != 1)


def _part(number: int, of: int) -> str:
    return f"{_count(number) if number else 'none'} of {_count(of)}"


def _title(records: Records) -> str:
    found = _datasets(records)
    algorithms = list(dict.fromkeys(name for entry in found for name in entry["algorithms"]))
    targets = {(run.args["dataset"], target) for run in records.runs for target in run.targets}
    if len(targets) == 1:
        run = records.runs[0]
        return f"{_listed(algorithms)} on {run.args['dataset']}, {names_of(run)[run.targets[0]]} unseen"
    return f"{_listed(algorithms)} on unseen domains of {_listed([entry['name'] for entry in found])}"


def _question(records: Records) -> str:
    found = _datasets(records)
    methods = (
        "each of these algorithms"
        if len({name for entry in found for name in entry["algorithms"]}) > 1
        else "this algorithm"
    )
    one = found[0]
    if len(found) > 1:
        return (
            "Trained on some domains of a data set and shown another for the first time: how many of its images "
            f"does {methods} still classify rightly?"
        )
    number = len(one["domains"])
    sources = number - min((len(run.targets) for run in records.runs if run.targets), default=0)
    return (
        f"The data set {one['name']} shows the same classes in {_count(number)} domains: "
        f"{_listed(one['domains'])}. Trained on {_count(sources)} of them and shown another for the first time, "
        f"how many of its images does {methods} still classify rightly?"
    )


def _facts(records: Records, finished: Records) -> list[tuple[str, str]]:
    """Small facts at the head of the page."""
    runs = records.runs
    trials, draws = ({run.args[key] for run in runs} for key in ("trial_seed", "hparams_seed"))
    steps = sorted({run.steps for run in runs if isinstance(run.steps, int)})
    backbones = sorted({str(run.args["backbone"]) for run in runs if run.args.get("backbone")})
    total = len(runs) + len(records.empty)
    facts = [
        ("Runs", f"{len(finished.runs)} of {total} finished" if len(finished.runs) < total else str(total)),
        ("Trials", str(len(trials))),
        *([("BatchSampler", str(len(draws)))] if len(draws) > 1 else []),
    ]
    if steps:
        facts.append(("Steps", str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"))
    return [*facts, *([("Network", _listed(backbones, 2))] if backbones else [])]


def _unfinished(records: Records) -> list[str]:
    lines = [f"{path.name}: no record yet" for path in records.empty]
    return lines + [
        f"{run.path.parent.name if run.path else run}: step {run.last_step:g} of {run.steps}"
        for run in records.runs
        if not run.finished
    ]


# Results --------------------------------------------------------------------------------------------------------------


def _results(records: Records, finished: Records) -> tuple[list[Result], list[str]]:
    """By each way of selecting that these runs allow; and why not by the others."""
    results: list[Result] = []
    notes: list[str] = []
    for method in METHODS if finished.runs else ():
        try:
            shown, extra = with_paper(partial(tables, finished, method, "sd"))
            accuracies: dict[str, dict[RowName, Trials]] = {}
            for row in select(finished, method):
                of = accuracies.setdefault(row["dataset"], {}).setdefault(RowName(row["algorithm"]), {})
                of.setdefault(row["target"], {})[row["trial"]] = row["accuracy"]
        except AidgnError as error:
            if method == "training":  # what the others need, most sweeps are not made for
                notes.append(str(error))
            continue
        for table in shown:
            drop_untargeted(table, records)
        result = Result(method, shown, extra, accuracies)
        result.answers = {
            entry["name"]: _answer(entry, accuracies.get(entry["name"], {})) for entry in _datasets(finished)
        }
        results.append(result)
    return results, notes


def _answer(entry: Mapping[str, Any], accuracies: Mapping[RowName, Trials]) -> str:
    """The result in words: whose average in the table is highest, and how much it is ahead of the next in the trials
    that both have, and whether in every one."""
    of = {name: accuracies[RowName(name)] for name in entry["algorithms"] if RowName(name) in accuracies}
    if not of:
        return ""
    targets = sorted({target for trials in of.values() for target in trials})
    names = entry["domains"]
    means = {
        name: {target: 100 * float(np.mean(list(trials[target].values()))) for target in targets}
        for name, trials in of.items()
        if trials.keys() == {*targets}
    }
    if not means:
        return "No algorithm has a result for every target yet, so nothing is averaged."
    best, *others = sorted(means, key=lambda name: -sum(means[name].values()))
    where = (
        f"on average over {_count(len(targets))} unseen domains"
        if len(targets) > 1
        else f"on {names[targets[0]]}, which it never saw"
    )
    text = f"{best} classifies {sum(means[best].values()) / len(targets):.1f} % of the images rightly {where}"
    over = f" ({_trials(len(of[best][targets[0]])) if have_same_trials(of[best]) else 'whose trials differ'})."
    if others:
        text += _ahead(best, others[0], of, over)
    else:
        text += over
        if len(targets) > 1:
            low, high = (chosen(targets, key=means[best].__getitem__) for chosen in (min, max))
            text += (
                f" It ranges from {means[best][low]:.1f} % on {names[low]} to {means[best][high]:.1f} % on "
                f"{names[high]}."
            )
    if absent := [name for name in of if name not in means]:
        text += (
            f" {_listed(absent)} {'lacks' if len(absent) == 1 else 'lack'} some of these domains, and so "
            f"{'has' if len(absent) == 1 else 'have'} no average to compare."
        )
    return text


def _ahead(best: str, second: str, of: Mapping[str, Trials], over: str) -> str:
    """How `best` compares with `second`, in the trials that have every target of both; `over` says which trials the
    average of `best` is over, where these are not all."""
    targets = sorted(of[best])
    mine, theirs = (average_over_targets(of[name], targets) for name in (best, second))
    both = sorted(mine.keys() & theirs.keys())
    if not both:
        return (
            f"{over} It has no trial with all domains in common with {second}, the next in the table, so the two "
            "cannot be compared yet."
        )
    differences = [100 * (mine[trial] - theirs[trial]) for trial in both]
    more = float(np.mean(differences))
    if have_same_trials(of[best], of[second]):
        text = f", {more:.1f} points more than {second}." if more >= 0.05 else f", no more than {second}."
    else:
        apart = f"{abs(more):.1f} points {'ahead of' if more > 0 else 'behind'}" if abs(more) >= 0.05 else "level with"
        text = f"{over} In the {_trials(len(both))} that both have, it is {apart} {second}, the next in the table."
    if len(both) > 1:
        ahead = sum(difference > 0 for difference in differences)
        in_all = "in every trial" if ahead == len(both) else f"in {_part(ahead, len(both))} trials"
        text += f" It is ahead {in_all}; the difference is {min(differences):+.1f} to {max(differences):+.1f} points."
    else:
        text += " One trial cannot tell a difference of the algorithms from chance."
    if len(targets) > 1:
        wins = sum(sum(of[best][target][trial] - of[second][target][trial] for trial in both) > 0 for target in targets)
        text += f" Domain by domain it is ahead on {_part(wins, len(targets))}."
    return text
