"""The list of run options: what commands, plan files, checks and identities derive from it."""

from dataclasses import dataclass, fields
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from aidgn.cli.options import run_options as add_run_options
from aidgn.cli.sweep import sweep
from aidgn.cli.train import train
from aidgn.errors import ParameterError
from aidgn.runs import options
from aidgn.runs.options import RunOptions, option, run_options
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.plan_file import read_plans

NAMES = [entry.name for entry in run_options()]
EXAMPLES = {
    "steps": 7,
    "eval_every": 3,
    "image_size": 32,
    "backbone": "small",
    "weights": "none",
    "train_only": "last-stage",
    "views": 2,
    "average": "sma:20",
    "schedule": "halve:4,6",
    "warmup": 2,
    "warm_start": 3,
    "balance": "sampling",
    "select_by": "macro-f1",
    "batch_norm": "frozen",
    "optimizer": "adamw",
    "layer_decay": 0.5,
    "accumulate": 2,
    "augment_validation": True,
    "train_on_all": True,
    "evaluate_source_in": True,
    "skip_broken": True,
}


def test_every_option_has_an_example_here() -> None:
    assert set(EXAMPLES) == set(NAMES)


@pytest.mark.parametrize("command", [train, sweep])
def test_commands_have_every_option_of_a_run(command: click.Command) -> None:
    assert set(NAMES) <= {parameter.name for parameter in command.params}
    shown = CliRunner().invoke(command, ["--help"]).output
    assert all(entry.command_line in shown for entry in run_options())


@pytest.mark.parametrize("name", NAMES)
def test_option_reaches_the_run_from_a_plan_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        yaml.safe_dump({"datasets": "digits", "algorithms": "ERM", name: EXAMPLES[name]})
    )
    ((plan,), _) = read_plans(tmp_path / "plan.yaml")
    assert getattr(plan, name) == EXAMPLES[name]


@pytest.mark.parametrize("flag", ["--train", "--train-only"])
def test_both_names_of_the_part_that_trains(flag: str, tmp_path: Path) -> None:
    @click.command()
    @add_run_options("train_only")
    def command(**values: object) -> None:
        click.echo(values)

    assert "'train_only': 'last-stage'" in CliRunner().invoke(command, [flag, "last-stage"]).output
    key = flag.strip("-").replace("-", "_")
    (tmp_path / "plan.yaml").write_text(f"{{datasets: digits, algorithms: ERM, {key}: head}}")
    ((plan,), _) = read_plans(tmp_path / "plan.yaml")
    assert plan.train_only == "head" and options.without_aliases({key: 1, "steps": 2}) == {"train_only": 1, "steps": 2}


def test_options_reach_a_command_with_their_types() -> None:
    seen = {}

    @click.command()
    @add_run_options("steps", "average", "skip_broken", steps="as many as needed")
    def command(**values: object) -> None:
        seen.update(values)

    runner = CliRunner()
    runner.invoke(command, ["--steps", "12", "--average", "sma"], catch_exceptions=False)
    assert seen == {"steps": 12, "average": "sma", "skip_broken": False}
    assert "[default: as many as needed]" in runner.invoke(command, ["--help"]).output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("steps", True),
        ("steps", "many"),
        ("eval_every", -1),
        ("image_size", 7),
        ("average", "mean"),
        ("average", "sma:0"),
        ("train_only", "stage"),
        ("views", -1),
        ("skip_broken", 3),
        ("skip_broken", None),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        RunOptions(**{name: value}).check_options()  # type: ignore[arg-type]
    assert (caught.value.parameter, caught.value.value) == (name, value)


def test_identities_of_runs_made_by_0_1_0_are_unchanged() -> None:
    specs = {
        "digits-ERM-ink-trial0-draw0-be82c673": RunSpec("digits", "ERM", "ink", steps=4),
        "digits-AIDGN+SMA-ink+chalk-trial1-draw2-2c279a99": RunSpec(
            "digits", "AIDGN", ("ink", "chalk"), 1, 2, {"kappa": 5}, average="sma"
        ),
    }
    for key, spec in specs.items():
        assert spec.resolved(spec.load_dataset()).key() == key


def test_one_field_is_enough_to_add_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class More(RunOptions):
        made_up: int | None = option("An option that no run has", minimum=1)

    monkeypatch.setattr(options, "RunOptions", More)
    entry = list(run_options())[-1]
    assert (entry.name, entry.type, entry.command_line, entry.may_differ) == ("made_up", int, "--made-up", False)

    @click.command()
    @add_run_options()
    def command(**values: object) -> None:
        click.echo(values["made_up"])

    assert CliRunner().invoke(command, ["--made-up", "5"], catch_exceptions=False).output == "5\n"
    with pytest.raises(ParameterError):
        entry.convert(0)


@pytest.mark.parametrize(("value", "converted"), [(1, 1.0), (0.5, 0.5), (None, None)])
def test_numbers_of_a_fractional_option(value: object, converted: object) -> None:
    clip = options.Option(help="", name="clip", type=float, minimum=0, above=True)
    assert clip.convert(value) == converted and isinstance(clip.convert(value), float | None)


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "1"])
def test_unusable_numbers_of_a_fractional_option(value: object) -> None:
    clip = options.Option(help="", name="clip", type=float, minimum=0, above=True)
    with pytest.raises(ParameterError) as caught:
        clip.convert(value)
    assert caught.value.expected == "a number above 0"


def test_options_of_a_run_are_fields_of_its_specification() -> None:
    assert set(NAMES) < {entry.name for entry in fields(RunSpec)}
