"""Options that several commands share."""

from collections.abc import Callable
from typing import Any

import click

from aidgn.errors import UserError


def run_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """How and where runs are made, whatever they are."""
    for option in reversed((
        click.option("--out", default="runs", show_default=True, metavar="DIR", help="Where run folders are."),
        click.option("--data-dir", metavar="DIR", help="Where data sets are  [default: $AIDGN_DATA, else data/]."),
        click.option("--steps", type=int, metavar="N", help="Updates  [default: the data set's, 5000 for most]."),
        click.option("--eval-every", type=int, metavar="N",
                     help="Steps between evaluations  [default: the data set's]."),
        click.option("--batch-size", type=int, metavar="N", help="Images per source domain and step."),
        click.option("--image-size", type=int, metavar="N",
                     help="Side of the network's input; up to 64 suits --backbone small  [default: 224]."),
        click.option("--backbone", metavar="NAME",
                     help="A timm name with weights tag, torchvision/NAME, or small  [default: resnet50.tv_in1k; "
                          "small for small images]."),
        click.option("--weights", metavar="FILE|hub|none", help="Initial weights  [default: hub; none for small]."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE",
                     help="A hyper-parameter; repeatable. `aidgn algorithms NAME` lists them."),
        click.option("--average", type=click.Choice(["sma", "swad"]),
                     help="Average the weights: sma over all steps from 100 on, swad over the validation-loss valley."),
        click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu."),
        click.option("--precision", default="auto", show_default=True, metavar="bfloat16|tf32|float32",
                     help="Arithmetic of the network; auto is bfloat16 on CUDA, float32 on the CPU."),
        click.option("--skip-broken", is_flag=True,
                     help="Leave out images that cannot be read (counted in the records)."),
    )):
        function = option(function)
    return function


def parse_settings(settings: tuple[str, ...], batch_size: int | None) -> dict[str, Any]:
    """--set name=value ... as a dictionary; values stay text, the hyper-parameter knows its type."""
    values: dict[str, Any] = {}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not name.strip() or not value.strip():
            raise UserError(f"--set {setting} is not of the form NAME=VALUE, for example --set lr=1e-5.")
        values[name.strip()] = None if value.strip().lower() == "none" else value.strip()
    if batch_size is not None:
        values["batch_size"] = batch_size
    return values
