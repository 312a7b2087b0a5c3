"""aidgn fit"""

from pathlib import Path

import click

from aidgn.cli.options import parse_settings
from aidgn.errors import AidgnError


@click.command(
    short_help="Your own pictures: what to expect on a new domain, and the model.",
    epilog="""\b
Examples:
  aidgn fit photos/
  aidgn fit photos/ --quick
  aidgn fit photos/ --out models/shelf --weights resnet50.safetensors
Interrupted by Ctrl-C, a crash or a reboot, the same command goes on where it stopped.""",
)
@click.argument("folder")
@click.option(
    "--quick",
    is_flag=True,
    help="A first answer: fewer steps, of the last stage and the classifier alone; "
    "with --weights none of the whole network, which takes longer.",
)
@click.option("--out", metavar="DIR", help="Where model, report and runs go  [default: runs/fit-NAME].")
@click.option(
    "--algorithm",
    default="AIDGN",
    show_default=True,
    metavar="NAME",
    help="What is compared with ERM; the better of the two makes the model.",
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Updates  [default: by the number of images].")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Images per domain and step.")
@click.option(
    "--image-size",
    type=click.IntRange(min=8),
    metavar="N",
    help="Side of the network's input  [default: 224; less for small pictures].",
)
@click.option(
    "--backbone",
    metavar="NAME",
    help="A timm name with weights tag, torchvision/NAME, or small  [default: "
    "resnet50.tv_in1k; resnet18.tv_in1k on a CPU; small for small pictures].",
)
@click.option("--weights", metavar="FILE|hub|none", help="Initial weights  [default: hub; none for small].")
@click.option(
    "--average",
    metavar="sma|swad|sma:N|none",
    help="Average the weights over steps, which "
    "makes steadier models and, for ERM, better ones  [default: sma; none from scratch, with --quick and for "
    "few steps].",
)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A hyper-parameter of the algorithm; repeatable."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Runs at a time  [default: one per GPU; on a CPU one, or one per core for small pictures].",
)
@click.option("--data-dir", metavar="DIR", help="Where data sets are, if FOLDER is the name of one.")
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
@click.option(
    "--precision",
    default="auto",
    show_default=True,
    metavar="bfloat16|tf32|float32",
    help="Arithmetic of the network; auto is bfloat16 on CUDA, float32 on the CPU.",
)
@click.option("--no-report", is_flag=True, help="Leave out the report page, which takes some time.")
def fit(
    folder: str,
    quick: bool,
    out: str | None,
    algorithm: str,
    steps: int | None,
    batch_size: int | None,
    image_size: int | None,
    backbone: str | None,
    weights: str | None,
    average: str | None,
    settings: tuple[str, ...],
    workers: int | None,
    data_dir: str | None,
    device: str,
    precision: str,
    no_report: bool,
) -> None:
    """Make a classifier from FOLDER/<domain>/<class>/<picture> and say how well it will do on a domain it never saw.

    Looks the folder through, leaves each domain out in turn to see how well it is predicted unseen, and trains the
    model on all of them."""

    from aidgn import fitting
    from aidgn.algorithms import find
    from aidgn.cli.display import RunDisplay, SweepDisplay
    from aidgn.data import load_dataset
    from aidgn.data.cache import prepare
    from aidgn.data.dataset import check_outside
    from aidgn.sweeps.journal import last_line
    from aidgn.sweeps.launchers.local import run_all
    from aidgn.training.featurizer import choose_device

    find(algorithm)
    choose_device(device)
    dataset = load_dataset(folder, data_dir)
    place = Path(out or f"runs/fit-{dataset.name}")
    check_outside(dataset, place)
    fitting.check_place(place, dataset)
    size = image_size or fitting.choose_size(dataset)
    dataset = dataset.with_image_size(fitting.quick_size(size, device) if quick and not image_size else size)
    with RunDisplay() as display:
        prepared = prepare(
            dataset, skip_broken=True, on_progress=lambda done, total: display.update("decoding images", done, total)
        )
    dataset = prepared.dataset
    told = fitting.survey(prepared)
    for sentence in told:
        click.echo(sentence)
    job = fitting.plan(
        dataset,
        folder,
        algorithm,
        quick=quick,
        device=device,
        hyper_parameters=parse_settings(settings, batch_size),
        steps=steps,
        backbone=backbone,
        weights=weights,
        average=average,
    )
    specs = [*job.estimates, job.finals[job.preferred]]
    click.echo(fitting.describe(job))
    fitting.fetch_weights(job)

    with SweepDisplay(specs) as progress:

        def train(first: int, number: int) -> None:
            failed = run_all(
                specs[first : first + number],
                place / "runs",
                workers=workers,
                device=device,
                precision=precision,
                data_dir=data_dir,
                on_event=lambda run, kind, what: progress.update(first + run, kind, what),
            )
            if failed:
                raise AidgnError(
                    f"{len(failed)} of {number} runs failed, with what they said in "
                    f"{place / 'runs' / '.sweep'}; the first: {last_line(next(iter(failed.values())))}"
                )
            fitting.check_same_images(
                specs[-1].identity(dataset, prepared.content),
                [progress.folders[run] for run in range(first, first + number)],
            )

        train(0, len(job.estimates))
        found = fitting.estimates([progress.folders[number] for number in range(len(job.estimates))])
        chosen = fitting.best(found, job.preferred)
        specs[-1] = job.finals[chosen]
        train(len(job.estimates), 1)
    run = Path(progress.folders[len(job.estimates)])
    model, seen = fitting.keep_model(run, place), fitting.seen_accuracy(run)
    sentences = [
        *fitting.answer(found, chosen, seen, len(dataset.classes)),
        *fitting.replaced(place, specs[-1], dataset),
    ]
    (place / "report.html").unlink(missing_ok=True)  # of an earlier fit
    fitting.write_summary(place, [*told, fitting.describe(job), *sentences], found, specs[-1], seen, model, dataset)
    for sentence in sentences:
        click.echo(sentence)
    page = None if no_report else _report(place, list(progress.folders.values()), data_dir, device, algorithm)
    click.echo(f"Model: {model}   Report: {place / 'REPORT.md'}{f' and {page}' if page else ''}")
    click.echo(f"Use it: {fitting.predict_line(model, specs[-1])}")


def _report(place: Path, runs: list[str], data_dir: str | None, device: str, algorithm: str) -> Path | None:
    """The report page of these runs, not of others that an earlier fit left beside them; a model is there even if it
    cannot be made."""
    from aidgn.cli.display import RunDisplay

    try:
        from aidgn.report.page import write_report

        with RunDisplay() as display:
            return write_report(
                runs,
                place / "report.html",
                data_dir=data_dir,
                device=device,
                algorithm=algorithm,
                points=1000,
                permutations=199,
                on_progress=display.update,
            )
    except (AidgnError, ImportError) as error:
        click.echo(f"The report page was not made: {error}", err=True)
        return None
