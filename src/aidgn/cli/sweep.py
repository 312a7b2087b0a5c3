"""aidgn sweep"""

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from aidgn.cli.options import (
    SOURCE_HELP,
    hyper_parameter_options,
    launcher_options,
    machine_options,
    plan_options,
    run_options,
    source_options,
)
from aidgn.errors import AidgnError, plural

if TYPE_CHECKING:
    from aidgn.report.table_formats import Table
    from aidgn.sweeps.plan import SweepPlan
    from aidgn.sweeps.sweep import Sweep

CONFIRM_SECONDS = 15 * 60  # a longer sweep is confirmed first
CONFIRM_RUNS = 50  # more runs are confirmed first, if the time is unknown


@click.command(
    epilog="""\b
Examples:
  aidgn sweep PACS --algorithm AIDGN --algorithm ERM
  aidgn sweep digits --algorithm AIDGN --draws 20 --trials 1 --out runs/search
  aidgn sweep experiments/table1.yaml --dry-run
  aidgn sweep runs/sweep.yaml
The same command continues the sweep and skips finished runs. More draws, trials or algorithms add runs.""",
)
@click.argument("data", nargs=-1, metavar="[DATA...|PLAN.yaml]")
@source_options()
@click.option("--plan", "plan_file", metavar="FILE", help="Read the plan from a YAML file; options replace its values.")
@plan_options
@click.option(
    "--retries",
    type=int,
    default=2,
    metavar="N",
    help="Try a run that fails N more times before setting it aside.",
)
@click.option("--retry-failed", is_flag=True, help="Try the runs that were set aside again.")
@launcher_options
@click.option("--dry-run", is_flag=True, help="Print the number of runs and the expected time, and train nothing.")
@click.option("--yes", "-y", is_flag=True, help="Start long sweeps without asking.")
@run_options()
@hyper_parameter_options
@machine_options
@click.pass_context
def sweep(
    ctx: click.Context,
    data: tuple[str, ...],
    plan_file: str | None,
    launcher: Any,
    retries: int,
    dry_run: bool,
    yes: bool,
    out: str,
    data_dir: str | None,
    retry_failed: bool,
    device: str,
    trackers: tuple[str, ...],
    **values: Any,
) -> None:
    """Train every algorithm on every data set DATA, with each domain unseen in turn and several trials.

    PLAN.yaml has the same settings as the options. Without DATA, the command continues the sweep in --out."""
    from aidgn.api import train_plans
    from aidgn.data.source import DataSource

    columns = {name: values.pop(name) for name in SOURCE_HELP}
    options = {name: value for name, value in values.items() if is_given(ctx, name)}
    if any(columns.values()):
        data = tuple(str(DataSource.parse(name, **columns)) for name in data)
    plans, places = find_plans(data, plan_file, out if is_given(ctx, "out") else None, options)
    out = out if is_given(ctx, "out") else places.get("out", out)

    def confirm(todo: "Sweep", numbers: list[int]) -> bool:
        workers = launcher.workers_here([todo.specs[number] for number in numbers], device) if numbers else 1
        seconds = todo.seconds(numbers)
        seconds = None if seconds is None else seconds / workers
        print_plan(todo, len(numbers), workers, seconds, err=not dry_run)
        is_long = len(numbers) > CONFIRM_RUNS if seconds is None else seconds > CONFIRM_SECONDS
        asks = is_long and not yes and not dry_run and sys.stdin.isatty() and sys.stderr.isatty()
        return not asks or click.confirm("Start?", default=True, err=True)

    todo = train_plans(
        plans,
        out,
        launcher,
        retries=retries,
        retry_failed=retry_failed,
        data_dir=data_dir or places.get("data_dir"),
        device=device,
        trackers=trackers,
        dry_run=dry_run,
        confirm=confirm,
    )
    if dry_run:
        return
    if todo is None:
        click.echo("Nothing was started.", err=True)
        return
    print_end(todo, out)
    if todo.count("failed"):
        raise AidgnError(describe_failures(todo, out))


def is_given(ctx: click.Context, name: str) -> bool:
    """Return whether the command line has the option."""
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def find_plans(
    data: tuple[str, ...], plan_file: str | None, out: str | None, options: dict[str, Any]
) -> "tuple[list[SweepPlan], dict[str, str]]":
    """Return the plans of a file, of the sweep folder or of the options, with the options in place of a file's values.

    The second result holds the folders that a file names.
    """
    from dataclasses import replace

    from aidgn.sweeps.plan import SweepPlan
    from aidgn.sweeps.plan_file import read_plans
    from aidgn.sweeps.store import SweepFolder

    hyper_parameters = {name: parse_number(value) for name, value in options.pop("hyper_parameters").items()}
    files = [name for name in data if name.endswith((".yaml", ".yml"))] + ([plan_file] if plan_file else [])
    names = tuple(name for name in data if name not in files)
    if len(files) > 1:
        raise AidgnError(f"Give one plan, not {' and '.join(files)}.")
    if not files and not names:
        path = SweepFolder(out or "runs").yaml
        if not path.exists():
            raise AidgnError(
                f"Say which data sets, or give a plan: {path.parent} has no {path.name} to continue. For "
                "example: aidgn sweep digits --algorithm ERM --algorithm AIDGN"
            )
        files = [str(path)]
    if not files:
        if "algorithms" not in options:
            raise AidgnError("Say which algorithms with --algorithm NAME; `aidgn algorithms` lists them.")
        return [SweepPlan(datasets=names, **options, hyper_parameters=hyper_parameters)], {}
    path = Path(files[0])
    plans, places = read_plans(path)
    if sweep_folder := SweepFolder.of_plan(path):
        places.setdefault("out", str(sweep_folder.path))
    if names:
        options["datasets"] = names
    if options.keys() & {"targets", "leave_one_out", "trials", "draws"}:
        options["runs"] = ()  # these options replace the runs of the plan
    return [
        replace(plan, **options, hyper_parameters={**plan.hyper_parameters, **hyper_parameters}) for plan in plans
    ], places


def parse_number(value: Any) -> Any:
    """Return a text as a number if it is one, so that a plan reads the same from options and from a file."""
    for number_type in (int, float):
        try:
            return number_type(value)
        except (TypeError, ValueError):
            continue
    return value


def print_plan(todo: "Sweep", number: int, workers: int, seconds: float | None, err: bool) -> None:
    """Print how many runs there are, how many are left, and how long they take."""
    from aidgn.sweeps.timing import in_words

    def say(sentence: str) -> None:
        click.echo(sentence, err=err)

    specs = todo.specs
    parts = [
        plural(len({spec.dataset for spec in specs}), "data set"),
        plural(len({str(spec.label()) for spec in specs}), "algorithm"),
        plural(len({spec.draw for spec in specs}), "draw"),
        plural(len({spec.trial for spec in specs}), "trial"),
        *(f"{count} values of {name}" for name, count in count_values(todo).items()),
    ]
    if pairs := sum(len(spec.target) > 1 for spec in specs):
        parts.append(f"{pairs} of them with two unseen domains")
    aside = f", {todo.count('failed')} set aside" if todo.count("failed") else ""
    say(f"{plural(len(specs), 'run')}: {', '.join(parts)}. {todo.count('done')} finished{aside}, {number} to do.")
    for plan in todo.plans:
        for name, owners in plan.partly_set().items():
            say(f"{name} is set for {', '.join(owners)} alone: the others have no such hyper-parameter.")
    if todo.older:
        say(
            f"{plural(len(todo.older), 'run')} of {', '.join(dict.fromkeys(todo.older))} made before the file "
            "was changed: finished ones stay in tables, in separate rows."
        )
    if todo.missing_datasets:
        say(f"Not on this disk: {', '.join(todo.missing_datasets)}.")
    if number and seconds is None:
        say("How long it takes on this machine is unknown until the first run has finished.")
    elif number:
        say(f"About {in_words(seconds or 0)} on {plural(workers, 'worker')} of this machine, by its runs so far.")


def count_values(todo: "Sweep") -> dict[str, int]:
    """Return the number of values of each hyper-parameter that the plan varies."""
    values: dict[tuple[str, str, str], set[str]] = {}
    for spec in todo.specs:
        if spec.draw == 0:  # other draws vary hyper-parameters, too
            for name, value in spec.hyper_parameters.items():
                values.setdefault((name, spec.dataset, str(spec.label())), set()).add(str(value))
    counts: dict[str, int] = {}
    for (name, *_), different in values.items():
        counts[name] = max(counts.get(name, 0), len(different))
    return {name: count for name, count in counts.items() if count > 1}


def print_end(todo: "Sweep", out: str) -> None:
    """Print how many runs are finished, and tables if all are."""
    done = todo.count("done")
    verb, them = ("is", "it") if len(todo.specs) == 1 else ("are", "them")
    shown = f" `aidgn table {quote(out)}` shows {them}." if done else ""
    click.echo(f"{done} of {plural(len(todo.specs), 'run')} {verb} finished.{shown}")
    if todo.edited_runs():
        click.echo(
            f"The file of a custom algorithm was changed meanwhile, so {plural(todo.edited_runs(), 'run')} may be of "
            "either text. The same command trains the missing runs of the new text."
        )
    if todo.other_runs:
        click.echo(
            f"{todo.other_runs} more runs were planned here before; `aidgn sweep {quote(str(todo.folder.yaml))}` "
            "continues them."
        )
    if done < len(todo.specs):
        return
    if any(run.varied for run in todo.runs):
        from aidgn.report.sensitivity import write_sensitivity

        figures = ", ".join(map(str, write_sensitivity(out)))
        click.echo(f"Accuracy against each hyper-parameter that was varied: {figures}")
    from aidgn.report.table_formats import to_terminal

    for table in finished_tables(out):
        click.echo(f"\n{to_terminal(table)}")


def finished_tables(out: str) -> "list[Table]":
    """Return the tables of a sweep, with the paper's numbers where it has some; none if there is nothing to show."""
    from aidgn.report.paper import dataset_order, paper_ablation
    from aidgn.report.table import tables
    from aidgn.runs.reader import read_runs

    try:
        records = read_runs(out)
        paper = any(run.args["dataset"] in dataset_order() for run in records.runs)
        made = tables(records, paper=paper)
    except AidgnError:
        return []
    return [*made, *(paper_ablation(made) if paper else [])]


def describe_failures(todo: "Sweep", out: str) -> str:
    """Return the list of runs that were set aside, with their errors."""
    errors = [f"  {run}: {error}" for run, error in todo.errors()]
    lines = errors[:20]
    if len(errors) > 20:
        lines.append(f"  and {len(errors) - 20} more; `aidgn status {quote(out)}` lists them all")
    verb = "was" if len(errors) == 1 else "were"
    return "\n".join(
        [
            f"{plural(len(errors), 'run')} failed and {verb} set aside:",
            *lines,
            f"Their logs say more, or {todo.folder.attempts} if a run did not begin. The same command with "
            "--retry-failed tries them again.",
        ]
    )
