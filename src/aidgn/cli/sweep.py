"""aidgn sweep"""

import click

from aidgn.cli.options import parse_settings, run_options
from aidgn.errors import UserError


@click.command(short_help="Train many runs: algorithms, unseen domains, trials.", epilog="""\b
Examples:
  aidgn sweep PACS --algorithm AIDGN --algorithm ERM
  aidgn sweep digits --algorithm AIDGN --draws 20 --trials 1
The same command again continues: finished runs are not repeated; more draws, trials or algorithms add runs.""")
@click.argument("datasets", nargs=-1, required=True, metavar="DATA...")
@click.option("--algorithm", "algorithms", multiple=True, metavar="NAME", required=True, help="Repeatable.")
@click.option("--target", "targets", multiple=True, metavar="NAME",
              help="Unseen domain by name or letter; repeatable  [default: each domain in turn].")
@click.option("--trials", default=3, show_default=True, metavar="N", help="Repetitions with other splits and seeds.")
@click.option("--draws", default=1, show_default=True, metavar="N",
              help="Hyper-parameter draws; the first is the defaults.")
@click.option("--workers", type=int, metavar="N", help="Processes  [default: one per GPU, or per core on the CPU].")
@run_options
def sweep(datasets: tuple[str, ...], algorithms: tuple[str, ...], targets: tuple[str, ...], trials: int, draws: int,
          workers: int | None, out: str, data_dir: str | None, steps: int | None, eval_every: int | None,
          batch_size: int | None, image_size: int | None, backbone: str | None, weights: str | None,
          settings: tuple[str, ...], average: str | None, device: str, precision: str, skip_broken: bool) -> None:
    """Train many runs: every algorithm on every data set with every domain unseen once, several trials."""
    import os

    from aidgn.cli.display import SweepDisplay
    from aidgn.sweep import plan
    from aidgn.sweep.local import run_all
    from aidgn.training.featurizer import choose_device

    specs = plan(datasets, algorithms, targets=targets, trials=trials, draws=draws, data_dir=data_dir, steps=steps,
                 hyper_parameters=parse_settings(settings, batch_size), eval_every=eval_every,
                 image_size=image_size, backbone=backbone,
                 weights=weights, average=average, skip_broken=skip_broken)
    workers = workers or (1 if choose_device(device).type == "cuda" else os.cpu_count() or 1)
    with SweepDisplay(specs) as display:
        failed = run_all(specs, out, workers=workers, on_event=display.update, device=device, precision=precision,
                         data_dir=data_dir)
    click.echo(f"{len(specs) - len(failed)} of {len(specs)} runs are finished. `aidgn table {out}` shows them.")
    if failed:
        raise UserError("\n".join(f"{specs[number].algorithm}, {', '.join(specs[number].target)}, trial "
                                  f"{specs[number].trial} failed: {why}" for number, why in failed.items()))
