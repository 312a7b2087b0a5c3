"""Options that several commands share."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import click

from aidgn.errors import AidgnError
from aidgn.runs import options as runs_options

Command = Callable[..., Any]


def run_options(*names: str, **defaults: str) -> Callable[[Command], Command]:
    """Add the options of a run, which reach the command as keyword arguments named as the fields of `RunOptions`.

    Args:
        names: Fields of `RunOptions`; none stands for all.
        defaults: Sentences for `--help` by field, where the command has a default that differs from a run's.
    """
    chosen = [option for option in runs_options.run_options() if not names or option.name in names]
    return add_options(_click_option(option, defaults.get(option.name, option.default_help)) for option in chosen)


def _click_option(option: runs_options.Option, default_help: str) -> Callable[[Command], Command]:
    help_text = f"{option.help.rstrip('.')}  [default: {default_help}]." if default_help else option.help
    if option.type is bool:
        return click.option(option.command_line, option.name, is_flag=True, help=help_text)
    return click.option(
        option.command_line,
        option.name,
        type=option.type,
        default=option.default,
        metavar=option.metavar,
        help=help_text,
    )


def machine_options(function: Command) -> Command:
    """Add the options that say where runs are stored and computed, which do not change what a run is."""
    return add_options(
        (
            click.option("--out", default="runs", show_default=True, metavar="DIR", help="Where run folders are."),
            click.option("--data-dir", metavar="DIR", help="Where data sets are  [default: $AIDGN_DATA, else data/]."),
            click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu."),
            click.option(
                "--precision",
                default="auto",
                show_default=True,
                metavar="bfloat16|tf32|float32",
                help="Arithmetic of the network; auto is bfloat16 on CUDA, float32 on the CPU.",
            ),
            click.option(
                "--track",
                "trackers",
                multiple=True,
                type=click.Choice(["tensorboard", "wandb", "mlflow"]),
                help="Show the records there too; repeatable.",
            ),
        )
    )(function)


def hyper_parameter_options(function: Command) -> Command:
    """Add --batch-size and --set, which reach the command as the dictionary `hyper_parameters`."""

    @wraps(function)
    def command(*args: Any, settings: tuple[str, ...], batch_size: int | None, **values: Any) -> Any:
        return function(*args, hyper_parameters=parse_settings(settings, batch_size), **values)

    return add_options(
        (
            click.option("--batch-size", type=int, metavar="N", help="Images per source domain and step."),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="NAME=VALUE",
                help="A hyper-parameter; repeatable. `aidgn algorithms NAME` lists them.",
            ),
        )
    )(command)


def add_options(options: Iterable[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    """Return a decorator that adds click options, which `--help` lists in this order."""
    in_order = list(options)

    def decorate(function: Command) -> Command:
        for option in reversed(in_order):
            function = option(function)
        return function

    return decorate


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
