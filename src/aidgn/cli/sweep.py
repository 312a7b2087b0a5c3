"""aidgn sweep"""

import sys
from collections.abc import Callable
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from aidgn.cli.options import hyper_parameter_options, launcher_options, machine_options, run_options
from aidgn.errors import AidgnError, plural

if TYPE_CHECKING:
    from aidgn.report.table_formats import Table
    from aidgn.sweeps.plan import SweepPlan
    from aidgn.sweeps.plan_file import Plan
    from aidgn.training import RunSpec

LONG = 15 * 60  # seconds: what takes longer is asked about
ALIKE = 5  # runs that fail alike before any is done: the others would too
MANY = 50  # runs, where it is not known how long they take


@click.command(
    short_help="Train many runs: algorithms, unseen domains, trials.",
    epilog="""\b
Examples:
  aidgn sweep PACS --algorithm AIDGN --algorithm ERM
  aidgn sweep digits --algorithm AIDGN --draws 20 --trials 1 --out runs/search
  aidgn sweep experiments/table1.yaml --dry-run
  aidgn sweep runs/sweep.yaml
The same command again continues: finished runs are not repeated; more draws, trials or algorithms add runs.""",
)
@click.argument("data", nargs=-1, metavar="[DATA...|PLAN.yaml]")
@click.option("--plan", "plan_file", metavar="FILE", help="A YAML file with the plan; options given besides win.")
@click.option(
    "--algorithm",
    "algorithms",
    multiple=True,
    metavar="NAME",
    help="`aidgn algorithms` lists them; or path/to/file.py:Class of your own; repeatable.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="NAME",
    help="Unseen domain by name or letter; repeatable  [default: each domain in turn].",
)
@click.option(
    "--leave-one-out",
    is_flag=True,
    help="Add the runs with two unseen domains that `aidgn table --selection leave-one-out` needs.",
)
@click.option("--trials", type=int, metavar="N", help="Repetitions with other splits and seeds  [default: 3].")
@click.option("--draws", type=int, metavar="N", help="Hyper-parameter draws; the first is the defaults  [default: 1].")
@click.option(
    "--retries",
    type=int,
    default=2,
    show_default=True,
    metavar="N",
    help="How often a broken run is tried again before it is set aside.",
)
@click.option("--retry-failed", is_flag=True, help="Try the runs that were set aside anew.")
@launcher_options
@click.option("--dry-run", is_flag=True, help="Say how many runs there are and how long they take, and stop.")
@click.option("--yes", "-y", is_flag=True, help="Ask nothing.")
@run_options()
@hyper_parameter_options
@machine_options
@click.pass_context
def sweep(
    ctx: click.Context,
    data: tuple[str, ...],
    plan_file: str | None,
    retries: int,
    retry_failed: bool,
    launcher: str,
    launcher_settings: dict[str, Any],
    dry_run: bool,
    yes: bool,
    out: str,
    data_dir: str | None,
    device: str,
    trackers: tuple[str, ...],
    **given: Any,
) -> None:
    """Train many runs: every algorithm on every data set DATA with every domain unseen once, several trials.

    PLAN.yaml holds the same as the options do. Without DATA, the sweep in --out is continued."""
    from aidgn.cli.display import RunDisplay, SweepDisplay
    from aidgn.devices import choose_device, choose_precision
    from aidgn.sweeps.plan import agenda
    from aidgn.training.trackers import find_tracker

    if retries < 0:
        raise AidgnError(f"--retries is {retries}; expected a whole number of at least 0.")
    explicit = ctx.get_parameter_source("out") is not click.core.ParameterSource.DEFAULT
    plans, places = find_plans(data, plan_file, out if explicit else None, given)
    out = out if explicit else places.get("out", out)
    data_dir = data_dir or places.get("data_dir")
    run_all = find_launcher(launcher, launcher_settings, dry_run)
    workers = launcher_settings.get("workers")
    for tracker in trackers:
        find_tracker(tracker)
    precision = plans[0].precision
    if any(one.precision != precision for one in plans):
        raise AidgnError(f"The plans have different precisions, {precision} and others; a sweep has one.")
    if launcher == "local" and not dry_run:
        precision = choose_precision(precision, choose_device(device))
    with RunDisplay() as display:
        todo = agenda(
            plans,
            out,
            data_dir=data_dir,
            precision=None if precision == "auto" else precision,
            dry=dry_run,
            on_prepare=lambda done, total: display.update("decoding images", done, total),
        )
    if not dry_run:
        todo.check()
    todo.look(retries)
    numbers = todo.of_kind("left", "running", *(["failed"] if retry_failed else []))
    places_at_once = count_workers(launcher, device, workers, [todo.specs[number] for number in numbers])
    seconds = say_plan(todo, numbers, places_at_once, dry_run)
    if dry_run:
        if not any(one.skip_broken for one in plans):  # which images are left out is known once they are decoded
            todo.check()
        return
    if (
        numbers
        and not yes
        and sys.stdin.isatty()
        and sys.stderr.isatty()
        and (len(numbers) > MANY if seconds is None else seconds > LONG)
        and not click.confirm("Start?", default=True, err=True)
    ):
        click.echo("Nothing was started.", err=True)
        return

    if numbers:
        todo.enter(retries, data_dir)
        if retry_failed:
            todo.retry_failed()
        specs = [todo.specs[number] for number in numbers]
        with SweepDisplay(specs, done_before=todo.count("done")) as progress:
            run_all(
                specs,
                out,
                on_event=stopping(progress.update),
                retries=retries,
                device=device,
                precision=precision,
                data_dir=data_dir,
                trackers=trackers,
                **launcher_settings,
            )
        todo.look(retries)
    say_end(todo, out)
    if todo.count("failed"):
        raise AidgnError(failures(todo, out))


def stopping(update: Callable[[int, str, Any], None]) -> Callable[[int, str, Any], None]:
    """`update` for a launcher, that ends the sweep if the first runs all fail in the same way, as all others would."""
    from aidgn.sweeps.journal import last_line

    errors: list[str] | None = []

    def on_event(number: int, kind: str, what: Any) -> None:
        nonlocal errors
        update(number, kind, what)
        if kind == "done":
            errors = None
        elif kind == "failed" and errors is not None:
            errors.append(last_line(what))
            if errors == errors[:1] * ALIKE:
                raise AidgnError(
                    f"The first {ALIKE} runs failed alike, so the others were not started: {errors[0]}\n"
                    "Once that is mended, the same command with --retry-failed goes on."
                )

    return on_event


def find_plans(
    data: tuple[str, ...], plan_file: str | None, out: str | None, given: dict[str, Any]
) -> "tuple[list[Plan], dict[str, str]]":
    """The plans of a file, of the sweep folder or of the options alone, with the options over them."""
    from dataclasses import replace

    from aidgn.sweeps.plan_file import Plan, read_plans

    hyper_parameters = {name: number(value) for name, value in given.pop("hyper_parameters").items()}
    options = {
        name: value for name, value in given.items() if not (value is None or value is False or value in ((), "auto"))
    }
    files = [name for name in data if name.endswith((".yaml", ".yml"))] + ([plan_file] if plan_file else [])
    names = tuple(name for name in data if name not in files)
    if len(files) > 1:
        raise AidgnError(f"Give one plan, not {' and '.join(files)}.")
    if not files and not names:
        path = Path(out or "runs") / "sweep.yaml"
        if not path.exists():
            raise AidgnError(
                f"Say which data sets, or give a plan: {path.parent} has no sweep.yaml to continue. For "
                "example: aidgn sweep digits --algorithm ERM --algorithm AIDGN"
            )
        files = [str(path)]
    if not files:
        if "algorithms" not in options:
            raise AidgnError("Say which algorithms with --algorithm NAME; `aidgn algorithms` lists them.")
        return [Plan(datasets=names, **options, hyper_parameters=hyper_parameters)], {}
    path = Path(files[0])
    plans, places = read_plans(path)
    if path.name == "sweep.yaml" and (path.parent / ".sweep").is_dir():
        places.setdefault("out", str(path.parent))
    if names:
        options["datasets"] = names
    return [
        replace(one, **options, hyper_parameters={**one.hyper_parameters, **hyper_parameters}) for one in plans
    ], places


def number(value: Any) -> Any:
    """Text as a number, where it is one, so that a plan reads the same from options and from a file."""
    for kind in (int, float):
        try:
            return kind(value)
        except (TypeError, ValueError):
            continue
    return value


def find_launcher(name: str, settings: dict[str, Any], dry_run: bool) -> Any:
    """The launcher's run_all, once it is known that it takes these settings and, but for a dry run, can be used."""
    import inspect
    from importlib import import_module

    module = import_module(f"aidgn.sweeps.launchers.{name}")
    for setting in settings:
        if setting not in inspect.signature(module.run_all).parameters:
            raise AidgnError(f"--{setting.replace('_', '-')} is not for --launcher {name}.")
    if name != "local" and not dry_run:
        module.check()
    return module.run_all


def count_workers(launcher: str, device: str, workers: int | None, specs: "list[RunSpec]") -> int:
    """How many runs are trained at once, as far as it is known beforehand."""
    from aidgn.sweeps.launchers.local import choose_places

    return len(choose_places(device, workers, specs)) if launcher == "local" and specs else workers or 1


def say_plan(todo: "SweepPlan", numbers: list[int], workers: int, dry_run: bool) -> float | None:
    """How many runs, how many of them are finished, how long it takes. Returns the seconds, None if not known."""
    from aidgn.algorithms import find
    from aidgn.sweeps.timing import GPU, STEP_MS, in_words

    specs = todo.specs
    kinds = [
        (len({spec.dataset for spec in specs}), "data set"),
        (len({spec.label() for spec in specs}), "algorithm"),
        (max(spec.draw for spec in specs) + 1, "draw"),
        (max(spec.trial for spec in specs) + 1, "trial"),
    ]
    text = ", ".join(plural(number, word) for number, word in kinds)
    values: dict[tuple[str, str, str], set[str]] = {}  # of hyper-parameters; draw 0 has those set by hand alone
    for spec in specs:
        for name, value in spec.hyper_parameters.items() if spec.draw == 0 else ():
            values.setdefault((spec.dataset, str(spec.label()), name), set()).add(str(value))
    varied = {name: max(len(values[key]) for key in values if key[2] == name) for _, _, name in values}
    text += "".join(f", {number} values of {name}" for name, number in varied.items() if number > 1)
    pairs = sum(len(spec.target) > 1 for spec in specs)
    text += f", {pairs} of them with two unseen domains" if pairs else ""
    aside = todo.count("failed")
    text += f". {todo.count('done')} finished" + (f", {aside} set aside" if aside else "") + f", {len(numbers)} to do."
    click.echo(f"{plural(len(specs), 'run')}: {text}", err=not dry_run)
    for name, owners in partly_set(todo).items():
        click.echo(
            f"{name} is set for {', '.join(owners)} alone: the others have no such hyper-parameter.", err=not dry_run
        )
    if todo.older:
        click.echo(
            f"{plural(len(todo.older), 'run')} of {', '.join(dict.fromkeys(todo.older))} made before the file "
            "was changed: those finished stay in tables, in rows of their own.",
            err=not dry_run,
        )
    if todo.absent:
        click.echo(f"Not on this disk: {', '.join(todo.absent)}.", err=not dry_run)
    if not numbers:
        return 0.0
    seconds = todo.seconds(numbers)
    on_h200 = todo.h200_seconds(numbers)
    if seconds is not None:
        seconds /= workers
        click.echo(
            f"About {in_words(seconds)} on {plural(workers, 'worker')} of this machine, by its runs so far.",
            err=not dry_run,
        )
    elif on_h200 is not None and not dry_run and GPU in device_name():
        seconds = on_h200 / workers
        click.echo(f"About {in_words(seconds)} here, by what was measured on an {GPU}.", err=True)
    else:
        click.echo("How long it takes on this machine is unknown until the first run has finished.", err=not dry_run)
    if dry_run and on_h200 is not None:
        hours = on_h200 / 3600
        own = sorted({find(spec.algorithm).name() for spec in specs} - STEP_MS.keys())
        click.echo(
            f"On one {GPU} about {hours:.3g} hours, on eight {hours / 8:.3g}: by step times measured with 3 x "
            "32 images, taken in proportion to the images of a step; compilation aside."
            + (f" Counted as ERM: {', '.join(own)}." if own else "")
        )
    return seconds


def partly_set(todo: "SweepPlan") -> dict[str, list[str]]:
    """Hyper-parameters that were given for all and that not all algorithms have, with those that do."""
    from aidgn.algorithms import find

    found = {}
    for plan in todo.plans:
        for name in plan.hyper_parameters:
            owners = [kind.name() for kind in map(find, plan.algorithms) if name in kind.search_space]
            if 0 < len(owners) < len(plan.algorithms):
                found[name] = owners
    return found


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def say_end(todo: "SweepPlan", out: str) -> None:
    done = todo.count("done")
    verb, them = ("is", "it") if len(todo.specs) == 1 else ("are", "them")
    shown = f" `aidgn table {quote(out)}` shows {them}." if done else ""
    click.echo(f"{done} of {plural(len(todo.specs), 'run')} {verb} finished.{shown}")
    if todo.changed():
        click.echo(
            f"The file of an own algorithm was changed meanwhile, so {plural(todo.changed(), 'run')} may be of "
            "either text. The same command trains those that the new one lacks."
        )
    if todo.others:
        click.echo(
            f"{todo.others} more runs were planned here before; `aidgn sweep {quote(str(todo.folder.yaml))}` "
            "goes on with them."
        )
    if done < len(todo.specs):
        return
    if any(item.varied for item in todo.items):
        from aidgn.report.sensitivity import write_sensitivity

        click.echo(
            "Accuracy against each hyper-parameter that was varied: " + ", ".join(map(str, write_sensitivity(out)))
        )
    from aidgn.report.table_formats import to_terminal

    for made in finished_tables(out):
        click.echo(f"\n{to_terminal(made)}")


def finished_tables(out: str) -> "list[Table]":
    """What `aidgn table` shows of a sweep, beside the paper's numbers where it has some; nothing where it would say why
    there is none."""
    from aidgn.report.paper import dataset_order, paper_ablation
    from aidgn.report.table import tables
    from aidgn.selection import read_runs

    try:
        records = read_runs(out)
        paper = any(run.args["dataset"] in dataset_order() for run in records.runs)
        made = tables(records, paper=paper)
    except AidgnError:
        return []
    return [*made, *(paper_ablation(made) if paper else [])]


def failures(todo: "SweepPlan", out: str) -> str:
    """The runs that were set aside, with their errors."""
    from aidgn.sweeps.journal import last_line

    numbers = todo.of_kind("failed")
    lines = [f"  {todo.items[number]}: {last_line(todo.states[number].history.error)}" for number in numbers[:20]]
    more = [f"  and {len(numbers) - 20} more; `aidgn status {quote(out)}` lists them all"] if len(numbers) > 20 else []
    verb = "was" if len(numbers) == 1 else "were"
    return "\n".join(
        [
            f"{plural(len(numbers), 'run')} failed and {verb} set aside:",
            *lines,
            *more,
            "Where it happened is in their logs, or, of runs that did not begin, in "
            f"{todo.folder.path / '.sweep' / 'attempts'}. The same command with --retry-failed tries them "
            "again.",
        ]
    )
