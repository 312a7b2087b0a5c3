"""aidgn fit"""

from typing import Any

import click

from aidgn.cli.options import device_option, hyper_parameter_options, precision_option, run_options, source_options
from aidgn.runs.options import CHOICES


@click.command(
    epilog="""\b
Examples:
  aidgn fit photos/
  aidgn fit photos/ --quick
  aidgn fit photos/ --train all
  aidgn fit photos/ --trials 3
  aidgn fit photos/ --metric macro-f1
  aidgn fit pictures.csv --file path --label diagnosis --domain hospital --group patient
  aidgn fit photos/ --layout "{domain}/{group}/{class}"
  aidgn fit photos/ --out models/shelf --weights resnet50.safetensors
After Ctrl-C, a crash or a reboot, the same command continues where it stopped.""",
)
@click.argument("folder")
@source_options()
@click.option(
    "--quick",
    is_flag=True,
    help="Get a first answer: train fewer steps and only the last stage of the network; on a CPU, only the classifier, "
    "on smaller pictures. With --weights none, train the whole network, which takes longer.",
)
@click.option(
    "--trials",
    default=1,
    type=click.IntRange(min=1),
    metavar="N",
    help="Leave each domain out N times with different seeds, for a steadier estimate.",
)
@click.option(
    "--refit",
    is_flag=True,
    help="Train the final model on the validation images too, for the number of steps that the estimate chose. The "
    "model has no warnings and no calibrated probabilities.",
)
@click.option(
    "--adapt",
    is_flag=True,
    help="Also measure adaptation to the unlabelled pictures of the domains left out, for `aidgn predict --adapt`.",
)
@click.option(
    "--metric",
    type=click.Choice(list(CHOICES)),
    help="Metric that chooses the algorithm on the domains left out, and the step of each run on validation pictures "
    "of the others. balanced (the mean accuracy of the classes) and macro-f1 are for classes of uneven size, and also "
    "try balanced samples unless --balance is given  [default: accuracy; macro-f1 if the largest class has ten times "
    "the images of the smallest].",
)
@click.option("--out", metavar="DIR", help="Folder for model, report and runs  [default: runs/fit-NAME].")
@click.option(
    "--algorithm",
    default="AIDGN",
    metavar="NAME",
    help="Algorithm to compare with ERM; the better of the two trains the model.",
)
@run_options(
    "steps",
    "image_size",
    "backbone",
    "weights",
    "train_only",
    "views",
    "average",
    "schedule",
    "warmup",
    "warm_start",
    "balance",
    steps="by the number of images",
    image_size="224; less for small pictures",
    backbone="resnet50.tv_in1k; resnet18.tv_in1k on a CPU; small for small pictures",
    train_only="all; last-stage with --quick; head on a CPU",
    average="sma, but none from scratch, on frozen features, with --quick or for few steps; `none` turns averaging off",
)
@hyper_parameter_options
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Train N runs at a time  [default: one per GPU; on a CPU one, or one per core for small pictures].",
)
@click.option("--data-dir", metavar="DIR", help="Folder with the data sets, if FOLDER is the name of a data set.")
@device_option
@precision_option
@click.option("--no-report", is_flag=True, help="Skip the report page to save time.")
def fit(folder: str, no_report: bool, **options: Any) -> None:
    """Train a classifier on FOLDER/<domain>/<class>/<picture>, or on a table with a row per picture, and estimate its
    accuracy on a domain it never saw.

    The command inspects the pictures, leaves each domain out in turn to measure the accuracy on unseen domains, and
    trains the model on all domains."""
    from aidgn.fitting import fit as fit_model

    result = fit_model(folder, report=not no_report, on_message=click.echo, **options)
    page = f" and {result.page}" if result.page else ""
    click.echo(f"Model: {result.model_folder}   Report: {result.report}{page}")
    click.echo(f"Use it: {result.predict_command}")
