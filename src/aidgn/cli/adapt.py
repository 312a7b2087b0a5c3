"""aidgn adapt"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from aidgn.adaptation.methods import METHODS
from aidgn.cli.options import custom_algorithms_option, data_option, device_option
from aidgn.errors import AidgnError, short

NAMES = {name.lower(): name for name in METHODS}


@click.command(
    epilog="""\b
Examples:
  aidgn adapt runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn adapt runs/ --method t3a --method tent
  aidgn table runs/ --adaptation --paper
Target images arrive without labels in batches of 32, in the split's shuffled order. The settings of a method are
selected on validation images of the source domains. RUN/adaptation.jsonl keeps the results, so nothing is measured
twice.""",
)
@click.argument("folders", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option(
    "--method",
    "methods",
    multiple=True,
    type=click.Choice([*NAMES], case_sensitive=False),
    help="Adaptation method; repeatable. tent takes longer than the others  [default: t3a, tent-c, tent-bn].",
)
@data_option
@click.option(
    "--features",
    metavar="FILE",
    help="Read the features of the run from FILE  [default: RUN/features.npz, computed if missing].",
)
@custom_algorithms_option
@device_option
def adapt(
    folders: tuple[str, ...],
    methods: tuple[str, ...],
    features: str | None,
    **options: Any,
) -> None:
    """Adapt finished runs to their unseen domain while they classify its images.

    For a SWEEP, adapt the runs that training-domain validation selects. The runs stay unchanged."""
    from aidgn.adaptation.evaluate import adapt as adapt_run
    from aidgn.adaptation.methods import DEFAULT
    from aidgn.progress import RunDisplay
    from aidgn.report.adaptation import adaptation_tables, choose_runs, keep_comparable, read_lines
    from aidgn.report.table_formats import to_terminal
    from aidgn.runs.folder import RunFolder

    names = list(dict.fromkeys(NAMES[method] for method in methods)) or list(DEFAULT)
    runs, notes = choose_runs(folders)
    if features is not None and len(runs) != 1:
        raise AidgnError(f"--features {features} is of one model, but there are {len(runs)} runs to adapt.")
    lines: list[dict[str, Any]] = []
    failed: list[str] = []
    settings_per_run = sum(len(METHODS[name].settings) for name in names)
    messages: list[str] = []
    with RunDisplay() as display:
        for number, run in enumerate(runs):

            def report(phase: str, done: int, total: int, before: int = number * settings_per_run) -> None:
                if phase == "adapting":
                    done += before
                    total = settings_per_run * len(runs)
                # Settings take different times, and each run begins with its features: a cycle is a whole run.
                cycle_end = phase != "adapting" or len(runs) == 1 or done % settings_per_run == 0
                display.update(phase, done, total, cycle_end=cycle_end)

            try:
                adapt_run(
                    run,
                    names,
                    features=features,
                    on_progress=report,
                    on_message=messages.append,
                    **options,
                )
                lines += [line for line in read_lines(run) if line["method"] in ("none", *names)]
            except AidgnError as error:
                failed.append(f"{run}: {error}" if len(runs) > 1 else str(error))
    for message in messages:
        click.echo(message, err=True)
    if lines:
        sweep = next((Path(folder) for folder in folders if not RunFolder(folder).exists), None)
        tables = adaptation_tables(lines, notes=notes) if sweep or len(runs) > 1 else []
        click.echo("\n\n".join(to_terminal(table) for table in tables) or _one_run(lines))
        if sweep is not None and (compared := keep_comparable(lines)):
            from aidgn.report.figures import save
            from aidgn.report.run_figures import adaptation_bars

            click.echo(f"Figure: {', '.join(map(str, save(adaptation_bars(compared), sweep, 'adaptation')))}")
        others = f" and {len(runs) - 1} more folders" if len(runs) > 1 else ""
        click.echo(
            f"All settings: {RunFolder(runs[0]).adaptation}{others}. `aidgn table {shlex.join(folders)} --adaptation` "
            "shows this again.",
            err=True,
        )
    if failed:
        raise AidgnError("\n".join(failed))


def _one_run(lines: Sequence[dict[str, Any]]) -> str:
    """Describe the selected setting of every method with its accuracies."""
    chosen = [line for line in lines if line["selected"]]
    settings = [", ".join(f"{key} {short(value)}" for key, value in line["settings"].items()) for line in chosen]
    width, first = max(map(len, settings)), chosen[0]
    head = (
        f"{first['dataset']}, {first['algorithm']}, {', '.join(first['target'])} unseen, trial {first['trial']}. "
        f"Settings chosen on held-out images of the source domains."
    )
    rows = [
        f"  {'as trained' if line['method'] == 'none' else line['method']:<10}  {setting:<{width}}  "
        f"sources {line['source_accuracy']:6.1%}   {', '.join(line['target'])} {line['target_accuracy']:6.1%}"
        for line, setting in zip(chosen, settings, strict=True)
    ]
    return "\n".join([head, *rows])
