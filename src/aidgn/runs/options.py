"""The options of a run, each declared once.

The command-line options of `aidgn train` and `aidgn sweep`, the keys of plan files, the checks of values, the rule
which runs may share a table, and the commands that reproduce runs are all derived from the fields of `RunOptions`.
This module imports nothing heavy, so that `aidgn --help` stays fast.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aidgn.errors import ParameterError

MAX_NUMBER = 10**9  # of steps, trials and draws
ALL = "all"  # values of --train
LAST_STAGE = "last-stage"
HEAD = "head"
DECAYS = ("cosine", "linear")  # schedules that end
NO_BALANCE = "none"  # values of --balance
SAMPLING = "sampling"
CLASS_WEIGHTS = "weights"
ACCURACY = "accuracy"
# Metrics that select a step or an algorithm: from values of --select-by and `fit --metric` to names in `METRICS`
CHOICES = {ACCURACY: "accuracy", "balanced": "balanced_accuracy", "macro-f1": "macro_f1"}


@dataclass(frozen=True)
class Option:
    """The description of one option, a field of `RunOptions` or of a launcher."""

    help: str  # the sentence that `--help` shows
    default_help: str = ""  # the default in words; empty for the number that the field has
    metavar: str = "N"  # placeholder of the value in `--help`
    minimum: float | None = None  # smallest value of a number
    above: bool = False  # whether a number must be larger than `minimum`
    maximum: int = MAX_NUMBER  # largest value of a whole number
    pattern: str | None = None  # regular expression that a text must match
    flag: str = ""  # option on the command line, if the name differs from the field's
    aliases: tuple[str, ...] = ()  # other names of the field that commands, plan files and Python functions accept
    # Whether runs in one sweep folder may have different values. If not, sweeps refuse a mixture, and tables of runs
    # from several folders name the difference (`aidgn.runs.differences`).
    may_differ: bool = False
    # Whether the value is part of a run's identity. "if set" omits the default, which keeps identities from before the
    # option existed valid.
    identity: Literal["always", "if set", "never"] = "if set"
    name: str = ""
    type: type = str
    default: Any = None

    @property
    def expected(self) -> str:
        """The values that `convert` accepts, in words."""
        if self.type is bool:
            return "true or false"
        if self.type in (int, float):
            number = "a whole number" if self.type is int else "a number"
            limit = "" if self.minimum is None else f" {'above' if self.above else 'of at least'} {self.minimum}"
            return number + limit + (f" and at most {self.maximum}" if self.type is int else "")
        return " or ".join(self.metavar.split("|")) if self.pattern else "a text"

    def convert(self, value: Any) -> Any:
        """Return the value as the option's type, or raise `ParameterError` if it cannot be used."""
        if value is None and self.default is None:
            return None
        if self.type is float and type(value) is int:
            value = float(value)  # so that 1 and 1.0 are the same run
        fits = type(value) is self.type
        if fits and self.type is float:
            fits = math.isfinite(value)
        if fits and self.minimum is not None:
            fits = value > self.minimum if self.above else value >= self.minimum
        if fits and self.type is int:
            fits = value <= self.maximum
        if fits and self.pattern is not None:
            fits = re.fullmatch(self.pattern, value) is not None
        if not fits:
            raise ParameterError(self.name, value, self.expected)
        return value

    @property
    def command_line(self) -> str:
        """Name of the option on the command line."""
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def command_line_names(self) -> list[str]:
        """All names of the option on the command line; messages use the first."""
        names = [self.name, *self.aliases]
        return list(dict.fromkeys([self.command_line, *(f"--{name.replace('_', '-')}" for name in names)]))


def option(help: str, default: Any = None, **settings: Any) -> Any:
    """Declare an option as a field of a dataclass; `settings` are those of `Option`."""
    if type(default) in (int, float):
        settings = {"default_help": f"{default:g}", **settings}
    return field(default=default, metadata={"help": help, **settings})


def choice(words: str, help: str, **settings: Any) -> Any:
    """Declare an option that is one of several words, which | separates."""
    return option(help, metavar=words, pattern=words, **settings)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options that single runs, sweeps and plan files share. None means the data set's or algorithm's default."""

    steps: int | None = option(
        "Number of updates", default_help="the data set's, 5000 for most", minimum=1, identity="always"
    )
    eval_every: int | None = option(
        "Steps between evaluations", default_help="the data set's", minimum=1, identity="always"
    )
    image_size: int | None = option(
        "Side of the input images in pixels; up to 64 suits --backbone small",
        default_help="224",
        minimum=8,
        maximum=1 << 14,
        identity="always",
    )
    backbone: str | None = option(
        "Network: a timm name with weights tag, torchvision/NAME, or small",
        default_help="resnet50.tv_in1k; small for small images",
        metavar="NAME",
        identity="always",
    )
    weights: str | None = option(
        "Initial weights", default_help="hub; none for small", metavar="FILE|hub|none", identity="always"
    )
    train_only: str | None = choice(
        f"{ALL}|{LAST_STAGE}|{HEAD}",
        "Train all, the last stage and the classifier, or the head (the classifier) alone, on the features of a frozen "
        "pretrained network, which are computed once",
        default_help="all",
        flag="--train",
        aliases=("train",),
    )
    views: int | None = option(
        "With --train head: augmented views of each image to train on in addition to the image itself. Each costs "
        "another pass over the images",
        default_help="0",
        minimum=0,
    )
    average: str | None = option(
        "Average the weights: sma over all steps from 100 (or N) on, swad over the validation-loss valley.",
        metavar="sma|swad|sma:N",
        pattern=r"sma|swad|sma:[1-9]\d*",
        may_differ=True,
        identity="always",
    )
    schedule: str | None = option(
        "Learning-rate schedule; cosine and linear fall to 0 at the last step, or at step N",
        default_help="constant, or the milestones of the data set for algorithms that use them",
        metavar="constant|cosine[:N]|linear[:N]|halve:STEP,...",
        pattern=r"constant|(cosine|linear)(:[1-9]\d*)?|halve:\d+(,\d+)*",
    )
    warmup: int = option("Raise the learning rate to its value over the first N steps", 0, minimum=0)
    warm_start: int = option("Train the head alone for the first N steps, then the whole network", 0, minimum=0)
    balance: str | None = choice(
        f"{NO_BALANCE}|{SAMPLING}|{CLASS_WEIGHTS}",
        "For rare classes: sampling draws the classes of a domain equally often, weights weighs the loss of each image "
        "by the inverse share of its class",
        default_help="none",
    )
    select_by: str | None = choice(
        "|".join(CHOICES),
        "Metric that selects the step on validation images of the sources: accuracy, mean accuracy of the classes, or "
        "macro-F1",
        default_help="accuracy",
    )
    batch_norm: str | None = choice(
        "frozen|live",
        "Statistics of batch norm: frozen keeps those of the initial weights, live follows the batches",
        default_help="frozen; live with --weights none",
    )
    optimizer: str | None = choice(
        "adam|adamw",
        "Optimizer: adam adds weight decay to gradients, adamw shrinks weights, but no biases and norms, directly",
        default_help="adam",
    )
    layer_decay: float | None = option(
        "Learning rate of a layer relative to the layer after it, such as 0.75 for a transformer of timm",
        default_help="1",
        metavar="FACTOR",
        minimum=0.0,
        above=True,
    )
    accumulate: int = option(
        "Compute gradients in N parts of a batch, for batches that do not fit into memory; for algorithms whose loss "
        "is a mean over samples",
        1,
        minimum=1,
        may_differ=True,
    )
    augment_validation: bool = option("Validate on augmented images, as DomainBed does.", False, identity="always")
    train_on_all: bool = option(
        "Train on the validation images too, and keep the last step: validation accuracies then mean nothing.", False
    )
    evaluate_source_in: bool = option(
        "Also measure the accuracy on the training images.",
        False,
        flag="--eval-in",
        may_differ=True,
        identity="always",
    )
    # Leaving images out changes the fingerprint of the data, which the identity has already.
    skip_broken: bool = option(
        "Leave out unreadable images; the records count them.", False, may_differ=True, identity="never"
    )

    @property
    def trains_head(self) -> bool:
        """Whether the network is frozen, so that runs train on its features."""
        return self.train_only == HEAD

    def check_options(self) -> dict[str, Any]:
        """Return the options by name as their types; raise `ParameterError` for the first that cannot be used."""
        return {entry.name: entry.convert(getattr(self, entry.name)) for entry in run_options()}


def run_options() -> Iterator[Option]:
    """List the options of a run in the order of their declaration."""
    return declared_options(RunOptions)


def parse_schedule(schedule: str | None) -> tuple[str, list[int]]:
    """Return the shape of a learning-rate schedule and its steps, such as ("halve", [2000, 4000]); "" for None."""
    shape, _, numbers = (schedule or "").partition(":")
    return shape, [int(number) for number in numbers.split(",") if number]


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace aliases of options by the names of the options."""
    names = {alias: option.name for option in run_options() for alias in option.aliases}
    return {names.get(name, name): value for name, value in values.items()}


def declared_options(declaring_class: Any) -> Iterator[Option]:
    """List the options that a dataclass declares with `option`."""
    hints = get_type_hints(declaring_class)
    for entry in (entry for entry in fields(declaring_class) if entry.metadata):
        hint = hints[entry.name]
        value_type = get_origin(hint) if get_origin(hint) is tuple else (*get_args(hint), hint)[0]
        yield Option(name=entry.name, type=value_type, default=entry.default, **entry.metadata)
