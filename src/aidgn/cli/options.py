"""Options that several commands share."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from aidgn.errors import AidgnError


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How and where runs are made, whatever they are."""
    for option in reversed(
        (
            click.option("--out", default="runs", show_default=True, metavar="DIR", help="Where run folders are."),
            click.option("--data-dir", metavar="DIR", help="Where data sets are  [default: $AIDGN_DATA, else data/]."),
            click.option("--steps", type=int, metavar="N", help="Updates  [default: the data set's, 5000 for most]."),
            click.option(
                "--eval-every", type=int, metavar="N", help="Steps between evaluations  [default: the data set's]."
            ),
            click.option("--batch-size", type=int, metavar="N", help="Images per source domain and step."),
            click.option(
                "--image-size",
                type=int,
                metavar="N",
                help="Side of the network's input; up to 64 suits --backbone small  [default: 224].",
            ),
            click.option(
                "--backbone",
                metavar="NAME",
                help="A timm name with weights tag, torchvision/NAME, or small  [default: resnet50.tv_in1k; "
                "small for small images].",
            ),
            click.option("--weights", metavar="FILE|hub|none", help="Initial weights  [default: hub; none for small]."),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="NAME=VALUE",
                help="A hyper-parameter; repeatable. `aidgn algorithms NAME` lists them.",
            ),
            click.option(
                "--average",
                metavar="sma|swad|sma:N",
                help="Average the weights: sma over all steps from 100 (or N) on, swad over the validation-loss "
                "valley.",
            ),
            click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu."),
            click.option(
                "--precision",
                default="auto",
                show_default=True,
                metavar="bfloat16|tf32|float32",
                help="Arithmetic of the network; auto is bfloat16 on CUDA, float32 on the CPU.",
            ),
            click.option(
                "--skip-broken", is_flag=True, help="Leave out images that cannot be read (counted in the records)."
            ),
            click.option(
                "--track",
                "trackers",
                multiple=True,
                type=click.Choice(["tensorboard", "wandb", "mlflow"]),
                help="Show the records there too; repeatable.",
            ),
        )
    ):
        function = option(function)
    return function


def launcher_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Where a sweep's runs are trained; what is given of these reaches the function as `launcher_settings`."""
    options = {
        "workers": click.option(
            "--workers",
            type=int,
            metavar="N",
            help="Worker processes; more than GPUs share them  [default: one per GPU; on the CPU "
            "one per core, or one for large images; with ray as many as there is room for; "
            "with slurm no limit].",
        ),
        "ray_address": click.option(
            "--ray-address",
            metavar="HOST:PORT",
            help="A Ray cluster  [default: $RAY_ADDRESS, else one is started here].",
        ),
        "gpus_per_run": click.option(
            "--gpus-per-run",
            type=float,
            metavar="N",
            help="ray, slurm: GPUs of each worker; 0.25 lets four share one (ray).",
        ),
        "cpus_per_run": click.option("--cpus-per-run", type=int, metavar="N", help="ray, slurm: CPUs of each worker."),
        "partition": click.option("--partition", metavar="NAME", help="slurm: where jobs are queued."),
        "time_limit": click.option("--time-limit", metavar="[D-]H:MM:SS", help="slurm: of each job."),
        "slurm": click.option(
            "--slurm",
            multiple=True,
            metavar="NAME=VALUE",
            help="slurm: any other option of sbatch, such as account=ours; repeatable.",
        ),
    }

    @wraps(function)
    def with_settings(*args: Any, **values: Any) -> Any:
        settings = {name: values.pop(name) for name in options}
        return function(
            *args,
            launcher_settings={name: value for name, value in settings.items() if value not in (None, ())},
            **values,
        )

    wrapped: Callable[..., Any] = with_settings
    for option in reversed(
        (
            click.option(
                "--launcher",
                type=click.Choice(["local", "ray", "slurm"]),
                default="local",
                show_default=True,
                help="Where the runs are trained.",
            ),
            *options.values(),
        )
    ):
        wrapped = option(wrapped)
    return wrapped


def parse_settings(settings: tuple[str, ...], batch_size: int | None) -> dict[str, Any]:
    """--set name=value ... as a dictionary; values stay text, the hyper-parameter knows its type."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise AidgnError(f"--set {setting} is not of the form NAME=VALUE, for example --set lr=1e-5.")
        if values.setdefault(name.strip(), value.strip()) != value.strip():
            raise AidgnError(
                f"--set {name.strip()} is given twice, {values[name.strip()]} and {value.strip()}: give one."
            )
    if batch_size is not None and values.setdefault("batch_size", str(batch_size)) != str(batch_size):
        raise AidgnError(f"--batch-size {batch_size} and --set batch_size={values['batch_size']} differ: give one.")
    return values
