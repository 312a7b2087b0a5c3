"""Inspect images, estimate the accuracy on an unseen domain, and train a model on all domains."""

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from aidgn import backbones
from aidgn.adaptation.predict import measure_adaptation
from aidgn.algorithms import find
from aidgn.analysis.predictions import load_predictions
from aidgn.api import split_options
from aidgn.data import load_dataset
from aidgn.data.cache import prepare
from aidgn.data.dataset import check_outside
from aidgn.data.layout import doubt_layout
from aidgn.data.table import find_source
from aidgn.devices import choose_device
from aidgn.errors import AidgnError, ParameterError, plural
from aidgn.fitting.ahead import ReportAhead
from aidgn.fitting.estimate import choose_algorithm, choose_metric, read_estimates, summarize
from aidgn.fitting.expectations import describe_expectations, measure_expectations
from aidgn.fitting.findings import describe_metric, inspect
from aidgn.fitting.forecast import describe_frozen
from aidgn.fitting.next_steps import advise
from aidgn.fitting.pictures import check_pictures, explain_doubts
from aidgn.fitting.plan import FitPlan, choose_image_size, name_of, plan_fit, plan_refit
from aidgn.fitting.result import FitResult
from aidgn.fitting.store import FitFolder
from aidgn.progress import RunDisplay, SweepDisplay
from aidgn.report.overview import Overview
from aidgn.results import RunResult
from aidgn.runs.folder import RunFolder
from aidgn.runs.options import ALL, CHOICES, RunOptions
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.journal import last_line
from aidgn.sweeps.launchers.base import Launcher
from aidgn.sweeps.launchers.in_process import InProcessLauncher
from aidgn.sweeps.launchers.local import LocalLauncher, refuse_in_import
from aidgn.sweeps.store import SweepFolder
from aidgn.terminal import log

REPORT_POINTS = 1000  # images in the report's maps of features
REPORT_PERMUTATIONS = 199

REFIT = (
    "The model was trained on all images for {steps} steps, the median of those selected while a domain was left out. "
    "The accuracy on domains it has seen is the mean of those runs. No image is left to measure warnings and "
    "calibrated probabilities on, so the model has none."
)


def fit(
    folder: Any,
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    layout: str | None = None,
    algorithm: str = "AIDGN",
    quick: bool = False,
    refit: bool = False,
    trials: int = 1,
    adapt: bool = False,
    metric: str | None = None,
    out: str | Path | None = None,
    hyper_parameters: Mapping[str, Any] | None = None,
    data_dir: str | Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    workers: int | None = None,
    report: bool = True,
    progress: bool = True,
    on_message: Callable[[str], None] = lambda sentence: None,
    **options: Any,
) -> FitResult:
    """Make a classifier from images and estimate its accuracy on a domain it never saw.

    Inspects the images, trains with each domain unseen once to estimate the accuracy there, compares with ERM, and
    trains the better of the two on all domains. The same call continues an interrupted one. In a script, call it below
    `if __name__ == "__main__":`, because worker processes import the script.

    Args:
        folder: Folder ROOT/<domain>/<class>/<image>, the name of a data set, a table with a row per image (CSV, TSV,
            JSON Lines, Parquet), or a table of pandas, polars or pyarrow.
        file: Column of a table with the image files, by default `file` or `file_name`.
        label: Column with the classes, by default `label`.
        domain: Column with the domains, by default `domain`.
        group: Column with groups, such as patients, whose images stay on one side of splits.
        layout: Levels of a folder, if they are not {domain}/{class}, such as {domain}/{group}/{class}.
        algorithm: The algorithm to compare with ERM, by name or path/to/file.py:Class.
        quick: Give a first answer: fewer steps, smaller images on a CPU, and only the last stage of a pretrained
            network, or only the classifier on a CPU.
        refit: Train the final model on all images, validation ones included, for the number of steps that the runs
            with a domain left out selected. The model then has no warnings and no calibrated probabilities, because no
            image is left to measure them on.
        trials: How often each domain is left out, with another seed each time.
        adapt: Whether to measure adaptation to unlabelled images of the domains left out, for `predict --adapt`.
        metric: The metric that chooses the algorithm, on the domains left out, and the step of each run, on validation
            images of the domains it trains on: accuracy, balanced (the mean accuracy of the classes) or macro-f1. By
            default accuracy, but macro-f1 if the largest class has ten times the images of the smallest. With balanced
            or macro-f1 and uneven classes, balanced samples are compared too, unless the option `balance` is set.
        out: Folder of model, report and runs; by default runs/fit-NAME.
        hyper_parameters: Values for the algorithm by name; they may be keyword arguments as well.
        data_dir: Folder of data sets, if `folder` is the name of one.
        device: cuda, cuda:1, mps or cpu.
        precision: Arithmetic of the network: bfloat16, tf32 or float32.
        workers: Number of runs that are trained at a time.
        report: Whether to write the report page, which takes some time.
        progress: Whether to show progress.
        on_message: Called with each sentence about the images, the plan and the result.
        options: Options of a run, such as `steps` or `backbone`, and hyper-parameters, such as `lr`.

    Returns:
        The result, with `expected`, `model`, `estimates` and `report`.

    Raises:
        AidgnError: The images cannot be used, or runs failed.

    Example:
        >>> import aidgn
        >>> result = aidgn.fit("digits", algorithm="ERM", steps=20, lr=2e-3, report=False, device="cpu")
        >>> result.expected.mean > 0
        True
    """
    refuse_in_import()
    find(algorithm)
    choose_device(device)
    if refit and adapt:
        raise AidgnError("A model of refit keeps no measurements of adapt: leave out one of them.")
    if metric not in (None, *CHOICES):
        raise ParameterError("metric", metric, " or ".join(CHOICES))
    settings, values = split_options(options, RunOptions, [algorithm])
    values |= hyper_parameters or {}
    run_options = {name: value for name, value in settings.items() if (name, value) != ("average", "none")}
    RunOptions(**run_options).check_options()
    source = find_source(folder, out or "runs", file=file, label=label, domain=domain, group=group, layout=layout)
    dataset = load_dataset(source if source.options else folder, data_dir)
    if source.layout is None and (doubt := doubt_layout(dataset)):
        raise AidgnError(doubt)
    place = FitFolder(out or f"runs/fit-{dataset.name}")
    check_outside(dataset, place.path)
    place.check(dataset)
    network_options: dict[str, Any] = {name: settings.get(name) for name in ("backbone", "weights", "image_size")}
    network = RunSpec(str(source), **network_options)
    image_size = network.choose_image_size(choose_image_size(dataset, quick=quick, device=device))
    network.try_network(image_size)
    dataset = dataset.with_image_size(image_size)
    with RunDisplay(progress) as display:
        decoded = prepare(
            dataset, skip_broken=True, on_progress=lambda done, total: display.update("decoding images", done, total)
        )
    dataset = decoded.dataset
    findings = inspect(decoded)
    if metric is None:
        metric = choose_metric(dataset)
        findings += describe_metric(dataset, metric, settings.get("balance") is None)

    def plan_runs(**options: Any) -> FitPlan:
        return plan_fit(
            dataset,
            str(source),
            algorithm,
            quick=quick,
            trials=trials,
            device=device,
            hyper_parameters=values,
            metric=metric,
            **options,
        )

    plan = plan_runs(**settings)
    if refit and not plan.estimates:
        raise AidgnError("refit takes the number of steps from runs that leave out a domain, but there is only one.")
    launcher: Launcher = LocalLauncher(workers)
    ahead: ReportAhead | None = None
    if plan.frozen and choose_device(device).type == "cpu":
        if settings.get("train_only") is None:
            whole = plan_runs(**{**settings, "train_only": ALL, "views": None})
            on_message(describe_frozen(plan, whole, dataset, device, measured=not RunFolder.find(place.runs, "*")))
        if workers is None:
            launcher = InProcessLauncher()
    if isinstance(launcher, LocalLauncher):  # fetch the weights before workers start
        backbones.create(str(plan.final.backbone), weights=plan.final.weights)
    for sentence in [*findings, str(plan)]:
        on_message(sentence)

    def train_all(specs: Sequence[RunSpec], done_before: int) -> list[str]:
        """Train the runs and return their folders."""
        with SweepDisplay(specs, done_before, progress) as sweep_display:

            def on_event(number: int, event: str, value: Any) -> None:
                nonlocal ahead
                sweep_display.update(number, event, value)
                if event == "step" and ahead is None and isinstance(launcher, InProcessLauncher):
                    ahead = ReportAhead.begin(REPORT_POINTS if report else 0)

            failures = launcher.run(
                specs, place.runs, device=device, precision=precision, data_dir=data_dir, on_event=on_event
            )
        if failures:
            raise AidgnError(
                f"{len(failures)} of {plural(len(specs), 'run')} failed; {SweepFolder(place.runs).attempts} has the "
                f"errors. The first: {last_line(next(iter(failures.values())))}"
            )
        folders = [sweep_display.folders[number] for number in range(len(specs))]
        check_same_images(plan.final.identity(dataset, decoded.content), folders)
        return folders

    folders = train_all(plan.estimates, 0)
    by_name: dict[str, list[str]] = {}
    for run, spec in zip(folders, plan.estimates, strict=True):
        by_name.setdefault(name_of(spec), []).append(run)
    estimates = read_estimates(by_name)
    chosen = choose_algorithm(estimates, plan.preferred, metric)
    final = plan.finals[chosen]
    unseen_runs = by_name.get(chosen, [])
    if refit:
        selected = [RunResult(Path(run)).best for run in unseen_runs]
        final = plan_refit(final, [evaluation.step for evaluation in selected])
    # The page compares runs with the same balance.
    compared = [folders[i] for i, spec in enumerate(plan.estimates) if spec.balance == final.balance]
    folders += train_all([final], len(folders))
    if ahead:
        ahead.join()
    extraction: dict[str, Any] = {"data_dir": data_dir, "device": device, "algorithm": algorithm}
    with RunDisplay(progress) as display:
        shown = {**extraction, "on_progress": display.update}
        predictions = [load_predictions(run, **shown) for run in unseen_runs]
        adaptation = measure_adaptation(unseen_runs, **shown) if adapt else None
        copies = ahead.copies if ahead else None
        pictures = check_pictures(predictions, folders[-1], decoded, copies, **shown)
        expectations = None if refit else measure_expectations(unseen_runs, folders[-1], adaptation, **shown)
    place.keep_model(folders[-1], expectations)
    seen_accuracy = RunResult(Path(folders[-1])).best.validation
    if refit:
        seen_accuracy = statistics.fmean(evaluation.validation for evaluation in selected)
    next_steps = advise(dataset, expectations, pictures, metric, shlex.quote(str(place.model)))
    accuracies = expectations.accuracies if expectations else None
    summary = [
        *summarize(estimates, chosen, seen_accuracy, len(dataset.classes), metric, accuracies),
        *(describe_expectations(expectations) if expectations else []),
        *([REFIT.format(steps=final.steps)] if refit else []),
        *place.describe_replaced(final, dataset),
    ]
    overview = Overview(dataset, summary, next_steps, expectations, predictions, pictures.labels, pictures.copies)
    if report:
        by_site = {of_run.targets[0]: run for of_run, run in zip(predictions, unseen_runs, strict=True)}
        heatmaps = explain_doubts(overview.shown_labels, by_site, decoded, device, algorithm)
        overview = replace(overview, heatmaps=heatmaps, findings=findings)
    summary = [*summary, *pictures.sentences()]
    result = FitResult(
        place.path, estimates, seen_accuracy, findings, summary, final, predictions, None, expectations, pictures
    )
    place.page.unlink(missing_ok=True)  # the page of an earlier fit
    known = (overview.class_metrics, overview.mistakes) if predictions else ()
    place.write(dataset, result, [*findings, str(plan)], next_steps, *known)
    for sentence in summary:
        on_message(sentence)
    if not report:
        return result
    return replace(result, page=_write_page(place, [*compared, folders[-1]], overview, progress, **extraction))


def check_same_images(identity: Mapping[str, Any], folders: Sequence[str | Path]) -> None:
    """Raise an error if the runs used images of another identity: the folder changed during training."""
    for folder in folders:
        if RunFolder(folder).identity["data"] != identity["data"]:
            raise AidgnError(
                f"The images of {identity['dataset']} changed while runs were trained on them, so the runs cannot be "
                "compared. The same command again repeats the runs that need it."
            )


def _write_page(
    place: FitFolder, runs: Sequence[str], overview: Overview, progress: bool, **extraction: Any
) -> Path | None:
    """Write the report page of these runs; if that fails, warn, because the model is finished."""
    from aidgn.report.page import write_report  # imports matplotlib and scikit-learn

    try:
        with RunDisplay(progress) as display:
            return write_report(
                runs,
                place.page,
                points=REPORT_POINTS,
                permutations=REPORT_PERMUTATIONS,
                overview=overview,
                on_progress=display.update,
                **extraction,
            )
    except (AidgnError, ImportError) as error:
        log.warning("The report page was not made: %s", error)
        return None
