"""The training functions at the top of the package: `aidgn.train`, `aidgn.sweep` and `aidgn.list_algorithms`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from aidgn.algorithms import ALGORITHMS, find
from aidgn.data.table import find_source
from aidgn.devices import choose_device, choose_precision
from aidgn.errors import AidgnError, ParameterError, UnknownNameError
from aidgn.progress import RunDisplay, SweepDisplay
from aidgn.results import RunResult, SweepResult
from aidgn.runs.options import without_aliases
from aidgn.runs.run_id import sweep_key
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.journal import reset_failures
from aidgn.sweeps.launchers.base import RETRIES, Launcher
from aidgn.sweeps.launchers.local import LocalLauncher, refuse_in_import
from aidgn.sweeps.plan import SweepPlan
from aidgn.sweeps.sweep import Sweep, stop_if_all_fail
from aidgn.training import train as train_run
from aidgn.training.trackers import find_tracker


def list_algorithms() -> list[str]:
    """Return the names of the algorithms.

    Example:
        >>> import aidgn
        >>> "AIDGN" in aidgn.list_algorithms()
        True
    """
    return list(ALGORITHMS)


def train(
    dataset: Any,
    *,
    target: str | Sequence[str],
    algorithm: str = "AIDGN",
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    layout: str | None = None,
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
        dataset: Name of a data set, a folder ROOT/<domain>/<class>/<image>, a table with a row per image (CSV, TSV,
            JSON Lines, Parquet), or a table of pandas, polars or pyarrow.
        target: Unseen domains, by name or letter; () trains on all domains.
        algorithm: Name of an algorithm, or path/to/file.py:Class.
        file: Column of a table with the image files, by default `file` or `file_name`.
        label: Column with the classes, by default `label`.
        domain: Column with the domains, by default `domain`.
        group: Column with groups, such as patients, whose images stay on one side of splits.
        layout: Levels of a folder, if they are not {domain}/{class}, such as {domain}/{group}/{class}.
        out: Folder of the run folders.
        data_dir: Folder of data sets.
        device: cuda, cuda:1, mps or cpu.
        precision: Arithmetic of the network: bfloat16, tf32 or float32.
        devices: Number of GPUs that share each step.
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
    refuse_in_import()
    settings, hyper_parameters = split_options(options, RunSpec, [algorithm])
    source = find_source(dataset, out, file=file, label=label, domain=domain, group=group, layout=layout)
    spec = RunSpec(str(source), algorithm, target, hyper_parameters=hyper_parameters, **settings)
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


def sweep(
    datasets: Sequence[Any],
    algorithms: Sequence[str],
    *,
    file: str | None = None,
    label: str | None = None,
    domain: str | None = None,
    group: str | None = None,
    layout: str | None = None,
    out: str | Path = "runs",
    workers: int | None = None,
    launcher: Launcher | None = None,
    retries: int = RETRIES,
    retry_failed: bool = False,
    data_dir: str | None = None,
    device: str = "auto",
    precision: str = "auto",
    trackers: Sequence[str] = (),
    progress: bool = True,
    **options: Any,
) -> SweepResult:
    """Train every algorithm on every data set with every domain unseen once. Finished runs are not repeated.

    Worker processes train the runs. They import the script that calls this function, so call it below
    `if __name__ == "__main__":` in a script; a notebook needs no such line.

    Args:
        datasets: Names of data sets, folders, or tables.
        algorithms: Names of algorithms, or path/to/file.py:Class.
        file: Column of tables with the image files.
        label: Column with the classes.
        domain: Column with the domains.
        group: Column with groups whose images stay on one side of splits.
        layout: Levels of the folders, if they are not {domain}/{class}.
        out: Folder of the sweep; `aidgn status` and `aidgn sweep` read it too.
        workers: Number of runs that are trained at a time on this machine; by default one per GPU, on the CPU one per
            core, or one for large images.
        launcher: Where to train, such as `aidgn.sweeps.launchers.slurm.SlurmLauncher()`; replaces `workers`.
        retries: How often a run that fails is tried again before it is set aside.
        retry_failed: Whether to try again the runs that an earlier call set aside.
        data_dir: Folder of data sets.
        device: cuda, cuda:1, mps or cpu.
        precision: Arithmetic of the network: bfloat16, tf32 or float32.
        trackers: Names of trackers that show the records: tensorboard, wandb, mlflow.
        progress: Whether to show progress.
        options: Fields of `SweepPlan` (`targets`, `trials`, `draws`, `steps`, ...), and hyper-parameters of the
            algorithms; a list gives values to try.

    Returns:
        The sweep, with `table()`, `records`, `failures` and `to_pandas()`.

    Example:
        >>> import aidgn
        >>> runs = aidgn.sweep(["digits"], ["ERM"], targets=["ink"], trials=1, steps=20, device="cpu", workers=1)
        >>> len(runs.runs)
        1
    """
    refuse_in_import()
    settings, hyper_parameters = split_options(options, SweepPlan, algorithms)
    settings["targets"] = tuple(settings.get("targets", ()))
    columns = {"file": file, "label": label, "domain": domain, "group": group, "layout": layout}
    plan = SweepPlan(
        datasets=tuple(str(find_source(data, out, **columns)) for data in datasets),
        algorithms=tuple(algorithms),
        hyper_parameters=hyper_parameters,
        precision=precision,
        **settings,
    )
    runs = train_plans(
        [plan],
        out,
        launcher or LocalLauncher(workers),
        retries=retries,
        retry_failed=retry_failed,
        data_dir=data_dir,
        device=device,
        trackers=trackers,
        progress=progress,
    )
    assert runs is not None
    keys = {runs.runs[number].key for number in runs.numbers("done")}
    names = [name for name in runs.folder.run_folders() if sweep_key(runs.folder.identity(name)) in keys]
    return SweepResult(
        runs.folder.path,
        [runs.folder.path / name for name in names],
        {str(run): error for run, error in runs.errors()},
    )


def train_plans(
    plans: Sequence[SweepPlan],
    out: str | Path,
    launcher: Launcher,
    *,
    retries: int = RETRIES,
    retry_failed: bool = False,
    data_dir: str | None = None,
    device: str = "auto",
    trackers: Sequence[str] = (),
    progress: bool = True,
    dry_run: bool = False,
    confirm: Callable[[Sweep, list[int]], bool] = lambda *_: True,
) -> Sweep | None:
    """Train the unfinished runs of plans. `sweep` describes the other arguments.

    Args:
        plans: The plans.
        dry_run: Plan the runs without writing or training anything.
        confirm: Called with the sweep and the numbers of the runs to train, before they are trained.

    Returns:
        The sweep; None if `confirm` refused.
    """
    if retries < 0:
        raise ParameterError("retries", retries, "a whole number of at least 0")
    for tracker in trackers:
        find_tracker(tracker)
    if not dry_run:
        launcher.check()
    precision = plans[0].precision
    if any(plan.precision != precision for plan in plans):
        raise AidgnError(f"The plans have different precisions, {precision} and others; a sweep has one.")
    if isinstance(launcher, LocalLauncher) and not dry_run:
        precision = choose_precision(precision, choose_device(device))
    with RunDisplay(progress) as decoding:
        runs = Sweep.prepare(
            plans,
            out,
            data_dir=data_dir,
            precision=None if precision == "auto" else precision,
            dry_run=dry_run,
            on_prepare=lambda done, total: decoding.update("decoding images", done, total),
        )
    if not dry_run:
        runs.check()
    runs.refresh(retries)
    numbers = runs.numbers("left", "running", *(["failed"] if retry_failed else []))
    if not confirm(runs, numbers):
        return None
    if dry_run:
        if not any(plan.skip_broken for plan in plans):  # decoding shows which images are left out
            runs.check()
    elif numbers:
        runs.save_plan(retries, data_dir)
        for number in runs.numbers("failed") if retry_failed else []:
            reset_failures(runs.folder.path, runs.runs[number].key)
        specs = [runs.specs[number] for number in numbers]
        with SweepDisplay(specs, runs.count("done"), progress) as display:
            launcher.run(
                specs,
                runs.folder.path,
                on_event=stop_if_all_fail(display.update),
                retries=retries,
                data_dir=data_dir,
                device=device,
                precision=precision,
                trackers=trackers,
            )
        runs.refresh(retries)
    return runs


def split_options(
    values: Mapping[str, Any], options: type[Any], algorithms: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separate the options from hyper-parameters.

    Args:
        values: Options and hyper-parameters by name. `hyper_parameters` may hold a mapping with more of the latter.
        options: The dataclass whose fields are the options.
        algorithms: The algorithms that have the hyper-parameters.
    """
    known = [field.name for field in fields(options)]
    values = without_aliases(values)
    settings = {name: value for name, value in values.items() if name in known}
    hyper_parameters = dict(settings.pop("hyper_parameters", None) or {})
    hyper_parameters |= {name: value for name, value in values.items() if name not in known}
    spaces = {name: None for algorithm in algorithms for name in find(algorithm).search_space}
    for name in values:
        if name not in known and name not in spaces:
            raise UnknownNameError(
                "option or hyper-parameter",
                name,
                [*known, *spaces],
                f"Options: {', '.join(known)}. Hyper-parameters of {', '.join(algorithms)}: {', '.join(spaces)}.",
            )
    return settings, hyper_parameters
