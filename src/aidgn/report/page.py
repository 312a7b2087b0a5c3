"""Write the report: one HTML file with everything about runs, which needs no network and no other file."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import aidgn
from aidgn.algorithms.custom import is_custom
from aidgn.analysis.comparison import MIN_TRIALS
from aidgn.data.registry import DATASETS
from aidgn.errors import AidgnError, some
from aidgn.escape import for_terminal, open_templates
from aidgn.files import for_json, write_text
from aidgn.new_site.interval import percent
from aidgn.report import reproduce
from aidgn.report.overview import Overview, shade_rows
from aidgn.report.page_data import (
    MANY_RUNS,
    adaptation,
    bars,
    curves,
    datasets_of,
    list_search,
    names_of,
    representatives,
)
from aidgn.report.page_results import Result, make_results
from aidgn.report.paper import dataset_order, paper_order
from aidgn.report.table import in_order
from aidgn.report.table_formats import Table
from aidgn.runs.folder import RunFolder
from aidgn.runs.packed import SUFFIX as PACKED
from aidgn.runs.reader import read_runs
from aidgn.runs.records import Records
from aidgn.selection import select_runs
from aidgn.terminal import log

COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

POINTS = 2000  # images in the latent space; the default of `aidgn report`

Progress = Callable[[str, int, int], None]  # part of the work, done, total


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    *,
    points: int = POINTS,
    permutations: int = 999,
    overview: Overview | None = None,
    on_progress: Progress | None = None,
    **extraction: Any,
) -> Path:
    """Write the report of the runs below the folders to the file `out`. The page names missing parts.

    Args:
        folders: Folders of runs, or folders around them.
        out: The HTML file.
        points: Images of each data set in the latent space, which shows one run per algorithm and target.
        permutations: Permutations behind the diagnosis of the latent space.
        overview: The first section, for runs of `fit`.
        on_progress: Called with the part of the work, the number done and the total.
        extraction: Arguments of `extract_features`: where images are, where to compute, custom algorithms.
    """
    from aidgn.report.latent_view import collect_views

    records = read_runs(*folders)
    if not records.runs:
        raise AidgnError(f"There is nothing to report: the runs in {', '.join(map(str, folders))} have no record yet.")
    finished = records.finished()
    datasets = in_order({run.args["dataset"] for run in records.runs}, dataset_order())
    algorithms = in_order({run.args["algorithm"] for run in records.runs}, paper_order())
    for collection in (records, finished):
        collection.runs.sort(
            key=lambda run: (
                datasets.index(run.args["dataset"]),
                algorithms.index(run.args["algorithm"]),
                run.targets,
                run.args["trial_seed"],
                run.args["hparams_seed"],
            )
        )
    results, notes = make_results(records, finished)
    latent = collect_views(
        [run.path.parent for run in representatives(finished) if run.path],
        points=points,
        permutations=permutations,
        on_progress=on_progress,
        **extraction,
    )
    if latent.notes:
        log.warning("The page cannot show everything: %s", some(latent.notes, 1))
    chosen = {result.method: select_runs(finished, result.method) for result in results}
    adapted, adaptation_notes = adaptation(finished)
    places: dict[str, list[Path]] = {}
    made_folders: dict[str, None] = {}  # the folders that the commands on the page make
    for folder in map(Path, folders):
        name = _place_name(folder)
        places.setdefault(name, []).append(folder)
        made_folders[str(Path(name, reproduce.name_folder(folder)))] = None
    payload = {
        "datasets": datasets_of(records),
        "letters": _letters(results),
        "bars": {
            result.method: [
                bars(table, records, result.accuracies.get(table.dataset or "", {})) for table in result.tables
            ]
            for result in results
        },
        "runs": curves(records, chosen),
        "search": list_search(finished),
        "adaptation": [bars(table, finished, {}) for table in adapted],
        "points": latent.points,
        "views": latent.views,
    }
    if overview:
        overview.load_thumbnails()
    text = _render(
        payload,
        latent.sheets,
        overview=overview,
        title=_title(records),
        datasets=payload["datasets"],
        min_trials=MIN_TRIALS,
        results=results,
        notes=notes,
        source_count=_source_count(records),
        facts=_facts(records, finished),
        views=latent.views,
        diagnoses=latent.diagnoses,
        latent_notes=latent.notes,
        adaptation=adapted,
        adaptation_notes=adaptation_notes,
        many=len(records.runs) > MANY_RUNS,
        commands=[
            line
            for name, members in places.items()
            for line in reproduce.commands(
                [run for run in records.runs if run.path and any(map(Path(str(run.path)).is_relative_to, members))],
                name,
            )
        ],
        again=_again(list(made_folders), adapted, extraction.get("algorithm"), points),
        versions=reproduce.versions(records.runs),
        hyper_parameters=reproduce.hyper_parameters(records.runs),
        unfinished=_unfinished(records),
        letters=payload["letters"],
    )
    write_text(out, text)
    return out


def _render(payload: Mapping[str, Any], sheets: Sequence[str], **context: Any) -> str:
    """Render the page. The template escapes text; the page's policy refuses other scripts."""
    from markupsafe import Markup

    here = Path(__file__).parent
    script, style = ((here / name).read_text(encoding="utf-8").strip() for name in ("page.js.j2", "page.css.j2"))
    templates = open_templates(here)
    templates.filters["breakable"] = lambda name: Markup("<wbr>").join(
        re.findall(r"[^\s_./-]{0,11}[\s_./-]|[^\s_./-]{1,12}", name)
    )
    templates.filters["percent"] = lambda share: "–" if share is None else f"{share:.1%}"
    templates.filters["whole"] = percent
    templates.filters["shades"] = shade_rows
    templates.filters["listed"] = _listed
    templates.filters["count"] = _count
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    text = templates.get_template("page.html.j2").render(
        **context,
        payload=as_json(payload),
        sheets=list(sheets),
        script=script,
        style=style,
        digest=digest,
        today=date.today().isoformat(),
        version=aidgn.__version__,
    )
    return for_terminal(text)  # the template escapes for HTML, where control characters pass


def as_json(value: Any) -> str:
    """Return JSON that is safe in a <script> element; NaN and infinity become null."""
    text = json.dumps(_show_control(for_json(value)), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _show_control(value: Any) -> Any:
    """Apply `for_terminal` to all texts, names of values included."""
    if isinstance(value, dict):
        return {_show_control(key): _show_control(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_show_control(entry) for entry in value]
    return for_terminal(value) if isinstance(value, str) else value


# What the runs are ----------------------------------------------------------------------------------------------------


def _place_name(folder: str | Path) -> str:
    """Return the folder around runs as the user gave it; of an absolute path, which is private, only the last part."""
    path = Path(folder)
    if path.is_file():
        path = path.with_suffix("") if path.suffix == PACKED else path.parent
    if RunFolder(path).exists:
        path = (path.resolve() if path.name in ("", "..") else path).parent
    return path.resolve().name if path.is_absolute() or path.name in ("", "..") else str(path)


def _again(
    folders: Sequence[str], adapted: Sequence[Table], algorithm: str | Sequence[str] | None, points: int
) -> list[str]:
    """Return the commands that make this page from the runs."""
    from aidgn.adaptation.methods import DEFAULT

    methods = {row.name.adaptation for table in adapted for row in table.rows if row.name} - {"none"}
    chosen = [part for name in sorted(methods) for part in ("--method", name.lower())] if methods != {*DEFAULT} else []
    custom = [
        part
        for name in ([algorithm] if isinstance(algorithm, str) else algorithm or ())
        if is_custom(name)  # `fit` also names the algorithms of the package
        for part in ("--algorithm", f"path/to/file.py:{name.rpartition(':')[2]}")
    ]
    adapt = [["aidgn", "adapt", *folders, *chosen, *custom]] if methods else []
    shown = ["--points", str(points)] if points != POINTS else []
    return [shlex.join(command) for command in (*adapt, ["aidgn", "report", *folders, *custom, *shown])]


def _letters(results: Sequence[Result]) -> dict[str, dict[str, str]]:
    """Return the domain of each letter in the tables, by data set."""
    tables = results[0].tables if results else []
    letters = {}
    for name, entry in DATASETS.items():
        has_letters = entry.letters != entry.domains
        columns = [{*table.columns} - {"Avg"} for table in tables if table.dataset == name]
        if has_letters and any(names <= {*entry.letters} for names in columns):
            letters[name] = dict(zip(entry.letters, entry.domains, strict=True))
    return letters


def _listed(names: Sequence[str], most: int = 4) -> str:
    """Join names as in 'a, b and c'."""
    names = [*names[:most], f"{_count(len(names) - most)} more"] if len(names) > most + 1 else list(names)
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else "".join(names)


def _count(number: int) -> str:
    return COUNTS[number] if number < len(COUNTS) else str(number)


def _title(records: Records) -> str:
    datasets = datasets_of(records)
    algorithms = list(dict.fromkeys(name for entry in datasets for name in entry["algorithms"]))
    targets = {(run.args["dataset"], target) for run in records.runs for target in run.targets}
    if len(targets) == 1:
        run = records.runs[0]
        return f"{_listed(algorithms)} on {run.args['dataset']}, {names_of(run)[run.targets[0]]} unseen"
    return f"{_listed(algorithms)} on unseen domains of {_listed([entry['name'] for entry in datasets])}"


def _source_count(records: Records) -> int:
    """Return the largest number of source domains of a run with a target."""
    targets = min((len(run.targets) for run in records.runs if run.targets), default=0)
    return len(names_of(records.runs[0])) - targets


def _facts(records: Records, finished: Records) -> list[tuple[str, str]]:
    """List facts for the head of the page."""
    runs = records.runs
    trials, draws = ({run.args[key] for run in runs} for key in ("trial_seed", "hparams_seed"))
    steps = sorted({run.steps for run in runs if isinstance(run.steps, int)})
    backbones = sorted({str(run.args["backbone"]) for run in runs if run.args.get("backbone")})
    total = len(runs) + len(records.empty)
    facts = [
        ("Runs", f"{len(finished.runs)} of {total} finished" if len(finished.runs) < total else str(total)),
        ("Trials", str(len(trials))),
        *([("Draws", str(len(draws)))] if len(draws) > 1 else []),
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
