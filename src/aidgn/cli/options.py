"""Options that several commands share."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from typing import Any

import click

from aidgn.errors import AidgnError
from aidgn.runs import options as runs_options

Command = Callable[..., Any]

device_option = click.option(
    "--device", default="auto", metavar="NAME", help="Where to compute: cuda, cuda:1, mps or cpu."
)
precision_option = click.option(
    "--precision",
    default="auto",
    metavar="bfloat16|tf32|float32",
    help="Arithmetic of the network; auto is bfloat16 on CUDA and float32 on the CPU.",
)
data_dir_option = click.option(
    "--data-dir", metavar="DIR", help="Folder with the data sets  [default: $AIDGN_DATA, else data/]."
)
data_option = click.option(
    "--data", metavar="DIR", help="Folder of the data set  [default: the folder that training used]."
)
moved_data_option = click.option(
    "--data", metavar="DIR", help="Folder of the training images, if they were moved after training."
)
custom_algorithm_option = click.option(
    "--algorithm", metavar="FILE.py:CLASS", help="File and class of the algorithm, if it is your own."
)
custom_algorithms_option = click.option(
    "--algorithm",
    multiple=True,
    metavar="FILE.py:CLASS",
    help="File and class of a custom algorithm; repeatable.",
)


SOURCE_HELP = {
    "file": ("COLUMN", "Column of a table with the image files; relative paths start at the table  [default: file]."),
    "label": ("COLUMN", "Column of a table with the classes  [default: label]."),
    "domain": ("COLUMN", "Column of a table with the domains  [default: domain]."),
    "group": ("COLUMN", "Column of a table with groups, such as patients, whose images stay on one side of splits."),
    "layout": ("LEVELS", 'Levels of a folder, such as "{domain}/{group}/{class}"  [default: {domain}/{class}].'),
}


def source_options(*names: str) -> Callable[[Command], Command]:
    """Add options for reading a table or folder.

    Args:
        names: Keys of `SOURCE_HELP`; without names, all.
    """
    return add_options(
        click.option(f"--{name}", metavar=SOURCE_HELP[name][0], help=SOURCE_HELP[name][1])
        for name in names or SOURCE_HELP
    )


def run_options(*names: str, **defaults: str) -> Callable[[Command], Command]:
    """Add the options of a run, which reach the command as keyword arguments named as the fields of `RunOptions`.

    Args:
        names: Fields of `RunOptions`; without names, all.
        defaults: Defaults for `--help` by field, where the default of the command differs from that of a run.
    """
    chosen = [option for option in runs_options.run_options() if not names or option.name in names]
    return add_options(_click_option(option, defaults.get(option.name, option.default_help)) for option in chosen)


def plan_options(function: Command) -> Command:
    """Add the options of a plan, which reach the command as keyword arguments named as the fields of `SweepPlan`."""
    from aidgn.sweeps.plan import plan_options as declared

    return add_options(_click_option(option, option.default_help) for option in declared())(function)


def _click_option(option: runs_options.Option, default_help: str) -> Callable[[Command], Command]:
    help_text = f"{option.help.rstrip('.')}  [default: {default_help}]." if default_help else option.help
    if option.type is bool:
        return click.option(option.command_line, option.name, is_flag=True, help=help_text)
    if option.type is tuple:
        return click.option(option.command_line, option.name, multiple=True, metavar=option.metavar, help=help_text)
    return click.option(
        *option.command_line_names,
        option.name,
        type=option.type,
        default=option.default,
        metavar=option.metavar,
        help=help_text,
        show_default=False,  # the text has it
    )


def machine_options(function: Command) -> Command:
    """Add the options for the folders and devices of runs, which do not change the identity of a run."""
    return add_options(
        (
            click.option("--out", default="runs", metavar="DIR", help="Folder for the run folders."),
            data_dir_option,
            device_option,
            precision_option,
            click.option(
                "--track",
                "trackers",
                multiple=True,
                type=click.Choice(["tensorboard", "wandb", "mlflow"]),
                help="Send the records to this tracker too; repeatable.",
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
                help="Set a hyper-parameter; repeatable. `aidgn algorithms NAME` lists them.",
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


def launcher_options(function: Command) -> Command:
    """Add --launcher and the options of all launchers; the command receives the `launcher`."""
    from aidgn.sweeps.launchers import LAUNCHERS

    declared: dict[str, runs_options.Option] = {}
    users: dict[str, list[str]] = {}
    for name, launcher in LAUNCHERS.items():
        for option in runs_options.declared_options(launcher):
            declared.setdefault(option.name, option)
            users.setdefault(option.name, []).append(name)

    @wraps(function)
    def command(*args: Any, launcher: str, **values: Any) -> Any:
        chosen = {name: values.pop(name) for name in declared}
        # Options that are not given: None, no flag, no repeated value. 0 is a value.
        chosen = {k: v for k, v in chosen.items() if v is not None and v is not False and v != ()}
        for name in chosen:
            if launcher not in users[name]:
                raise AidgnError(f"{declared[name].command_line} is not for --launcher {launcher}.")
        return function(*args, launcher=LAUNCHERS[launcher](**chosen), **values)

    choice = click.option(
        "--launcher",
        type=click.Choice(list(LAUNCHERS)),
        default="local",
        help="Where to train the runs: this machine, a Ray cluster or a SLURM cluster.",
    )
    options = []
    for name, option in declared.items():
        everywhere = len(users[name]) == len(LAUNCHERS)
        help_text = option.help if everywhere else f"{', '.join(users[name])}: {option.help}"
        options.append(_click_option(replace(option, help=help_text, default=None), option.default_help))
    return add_options([choice, *options])(command)


def parse_settings(settings: tuple[str, ...], batch_size: int | None) -> dict[str, Any]:
    """Return --set NAME=VALUE ... as a dictionary of texts; hyper-parameters convert their values."""
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
