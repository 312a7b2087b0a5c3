"""aidgn adapt"""

from collections.abc import Sequence
from typing import Any

import click

NAMES = {"t3a": "T3A", "tent-c": "Tent-C", "tent-bn": "Tent-BN", "tent": "Tent"}


@click.command(short_help="Test-time adaptation of trained runs: T3A, Tent.", epilog="""\b
Examples:
  aidgn adapt runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn adapt runs/ --method t3a --method tent
  aidgn table runs/ --adaptation --paper
Target images come unlabelled in batches of 32, in the split's shuffled order. Settings are chosen on held-out images of
the source domains. Results are kept in RUN/adaptation.jsonl: what is measured already is not measured again.""")
@click.argument("folders", nargs=-1, required=True, metavar="RUN|SWEEP...")
@click.option("--method", "methods", multiple=True, type=click.Choice([*NAMES], case_sensitive=False),
              help="Repeatable  [default: t3a, tent-c, tent-bn]. tent adapts the whole network, which takes longer.")
@click.option("--data", metavar="DIR", help="The data set's folder  [default: where the training found it].")
@click.option("--features", metavar="FILE", help="Features of the run  [default: RUN/features.npz, made if missing].")
@click.option("--algorithm", metavar="FILE.py:CLASS", help="Where the class is, if the algorithm is your own.")
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
def adapt(folders: tuple[str, ...], methods: tuple[str, ...], data: str | None, features: str | None,
          algorithm: str | None, device: str) -> None:
    """Adapt finished runs to their unseen domain while they classify it. Of a SWEEP, the runs that training-domain
    validation chooses; the runs themselves are never changed."""
    from aidgn.adaptation.runs import DEFAULT, SETTINGS, chosen_runs
    from aidgn.adaptation.runs import adapt as adapt_run
    from aidgn.cli.display import RunDisplay
    from aidgn.errors import UserError

    names = list(dict.fromkeys(NAMES[method] for method in methods)) or list(DEFAULT)
    runs, notes = chosen_runs(folders)
    if features is not None and len(runs) != 1:
        raise UserError(f"--features {features} is of one model, but there are {len(runs)} runs to adapt.")
    for note in notes:
        click.echo(note, err=True)
    lines: list[dict[str, Any]] = []
    failed: list[str] = []
    each = sum(len(SETTINGS[name]) for name in names)
    messages: list[str] = []
    with RunDisplay() as display:
        for number, run in enumerate(runs):
            def report(what: str, done: int, total: int, before: int = number * each) -> None:
                if what == "adapting":
                    done, total = before + done, each * len(runs)
                display.update(what, done, total)

            try:
                lines += [line for line in adapt_run(
                    run, names, data=data, device=device, algorithm=algorithm, features=features, on_progress=report,
                    on_message=messages.append) if line["method"] in ("none", *names)]
            except UserError as error:
                failed.append(f"{run}: {error}" if len(runs) > 1 else str(error))
    for message in messages:
        click.echo(message, err=True)
    if lines:
        _show(lines, len(runs))
    if failed:
        raise UserError("\n".join(failed))


def _show(lines: Sequence[dict[str, Any]], runs: int) -> None:
    chosen = [line for line in lines if line["selected"]]
    for line in chosen:
        settings = ", ".join(f"{key}={value}" for key, value in line["settings"].items())
        click.echo(f"{line['algorithm']}  {line['method']:<8}{settings:<20}  sources {line['source_accuracy']:.1%}  "
                   f"{', '.join(line['target'])} {line['target_accuracy']:.1%}")
