"""aidgn fit"""

from typing import Any

import click

from aidgn.cli.options import hyper_parameter_options, run_options


@click.command(
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
    help="A first answer: fewer steps, and only the last stage of the network. With --weights none the whole network "
    "is trained, which takes longer.",
)
@click.option("--out", metavar="DIR", help="Where model, report and runs go  [default: runs/fit-NAME].")
@click.option(
    "--algorithm",
    default="AIDGN",
    show_default=True,
    metavar="NAME",
    help="The algorithm to compare with ERM; the better of the two makes the model.",
)
@run_options(
    "steps",
    "image_size",
    "backbone",
    "weights",
    "average",
    steps="by the number of images",
    image_size="224; less for small pictures",
    backbone="resnet50.tv_in1k; resnet18.tv_in1k on a CPU; small for small pictures",
    average="sma; none, which can be given too, from scratch, with --quick and for few steps",
)
@hyper_parameter_options
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
def fit(folder: str, no_report: bool, **options: Any) -> None:
    """Make a classifier from FOLDER/<domain>/<class>/<picture> and say how well it will do on a domain it never saw.

    Inspects the pictures, leaves each domain out in turn to measure the accuracy on unseen domains, and trains the
    model on all domains."""
    from aidgn.fitting import fit as fit_model

    result = fit_model(folder, report=not no_report, on_message=click.echo, **options)
    page = f" and {result.page}" if result.page else ""
    click.echo(f"Model: {result.model_folder}   Report: {result.report}{page}")
    click.echo(f"Use it: {result.predict_command}")
