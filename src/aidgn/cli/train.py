"""aidgn train"""

from typing import Any

import click

from aidgn.cli.options import SOURCE_HELP, hyper_parameter_options, machine_options, run_options, source_options
from aidgn.errors import AidgnError, plural
from aidgn.runs.options import ACCURACY, CHOICES


@click.command(
    epilog="""\b
Examples:
  aidgn train digits --target chalk
  aidgn train PACS --target S --algorithm ERM --trial 1
  aidgn train photos/ --target hospital_c --set lr=1e-5 --steps 2000
After Ctrl-C, a crash or a reboot, the same command continues where it stopped.""",
)
@click.argument("data")
@source_options()
@click.option(
    "--algorithm",
    default="AIDGN",
    metavar="NAME",
    help="A name that `aidgn algorithms` lists, or path/to/file.py:Class for your own.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Leave out this domain, by name or letter; repeatable. `none` trains on all domains.",
)
@click.option("--trial", default=0, metavar="N", help="Seed of splits, batches and initial weights.")
@click.option("--draw", default=0, metavar="N", help="Number of the hyper-parameter draw; 0 uses the defaults.")
@click.option(
    "--devices",
    default=1,
    metavar="N",
    help="Share each step among N GPUs (or CPU processes). Results equal those of one device, up to rounding.",
)
@run_options()
@hyper_parameter_options
@machine_options
def train(
    data: str,
    algorithm: str,
    targets: tuple[str, ...],
    trial: int,
    draw: int,
    hyper_parameters: dict[str, Any],
    out: str,
    **options: Any,
) -> None:
    """Train one run on DATA, a data set from `aidgn data list`, a folder ROOT/<domain>/<class>/<image>, or a table."""
    from aidgn.algorithms import find
    from aidgn.data.source import DataSource
    from aidgn.metrics import METRICS
    from aidgn.progress import RunDisplay
    from aidgn.results import RunResult
    from aidgn.training import RunSpec
    from aidgn.training import train as train_run
    from aidgn.training.trackers import find_tracker

    machine = {name: options.pop(name) for name in ("data_dir", "device", "devices", "precision", "trackers")}
    find(algorithm)
    for tracker in machine["trackers"]:
        find_tracker(tracker)
    unseen_names = () if targets == ("none",) else targets
    source = DataSource.parse(data, **{name: options.pop(name) for name in SOURCE_HELP})
    spec = RunSpec(str(source), algorithm, unseen_names, trial, draw, hyper_parameters, **options)
    dataset = spec.load_dataset(machine["data_dir"])
    if not targets:
        raise AidgnError(
            "Name the domain to hold out with --target: "
            + ", ".join(
                f"{name} ({letter})" if letter != name else name
                for name, letter in zip(dataset.domains, dataset.info.letters, strict=True)
            )
            + "; or --target none to train on all of them."
        )
    resolved = spec.resolved(dataset)
    unseen = ", ".join(resolved.target) or "none"
    weights = "from scratch" if resolved.weights == "none" else resolved.weights
    click.echo(
        f"{dataset.name}, {resolved.label()}, unseen domain: {unseen}, trial {trial}: "
        f"{len(dataset.labels)} images, {plural(len(dataset.domains) - len(resolved.target), 'source domain')}, "
        f"{len(dataset.classes)} classes, {resolved.backbone} ({weights}), "
        f"{plural(int(resolved.steps or 0), 'step')}.",
        err=True,
    )
    with RunDisplay() as display:
        folder = train_run(spec, out, on_progress=display.run, **machine)
    if "training" not in display.tasks:
        click.echo("This run was finished before; nothing was left to train.", err=True)
    best = RunResult(folder).best
    for name in resolved.target:
        click.echo(f"{name} (never seen in training): {best.accuracies[name]:.1%}")
    click.echo(
        f"Validation images of the seen domains: {best.validation:.1%} at step {best.step}, selected by "
        f"{METRICS[CHOICES[resolved.select_by or ACCURACY]].noun} on them."
    )
    click.echo(f"Run folder: {folder}")
