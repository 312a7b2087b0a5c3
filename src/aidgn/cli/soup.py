"""aidgn soup"""

from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import click

from aidgn.cli.options import custom_algorithm_option, device_option, moved_data_option
from aidgn.errors import plural

if TYPE_CHECKING:
    from aidgn.soups import Soup


@click.command(
    epilog="""\b
Examples:
  aidgn soup runs/digits-ERM-chalk-trial0-draw* --out soup
  aidgn soup RUN1 RUN2 RUN3 --out soup --greedy
  aidgn predict soup photos/
Runs share their initial weights if they are of one algorithm, trial and unseen domain and start from the same network;
several draws of a sweep do. Runs of several trials do if all have --warm-start.""",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", required=True, metavar="DIR", help="Folder for the model.")
@click.option(
    "--greedy",
    is_flag=True,
    help="Leave out runs that lower the accuracy on validation images of the source domains.",
)
@moved_data_option
@custom_algorithm_option
@device_option
def soup(runs: tuple[str, ...], out: str, **options: Any) -> None:
    """Average the weights of RUN... into one model, which other commands read like the model of a run."""
    from aidgn.progress import RunDisplay
    from aidgn.soups import soup as mix

    with RunDisplay() as display:
        result = mix(runs, out, on_progress=display.update, **options)
    for line in describe(result):
        click.echo(line)
    click.echo(f"Model: {result.folder}")


def describe(result: "Soup") -> list[str]:
    """Describe the soup: a line per run and a line for the average."""
    lines = []
    for path, accuracy in zip_longest(result.runs, result.run_accuracies):
        note = "" if path in result.used else "  left out"
        lines.append(f"{path}" + ("" if accuracy is None else f"  {accuracy:.1%}") + note)
    average = f"Average of the weights of {plural(len(result.used), 'run')}"
    if result.accuracy is None:
        return [
            *lines,
            f"{average}; without their images its accuracy is unknown and its predictions have no warnings.",
        ]
    best = max(result.run_accuracies)
    lines.append(
        f"{average}: {result.accuracy:.1%} of the validation images of the source domains, best run {best:.1%}."
    )
    if result.accuracy < best:
        lines.append("The average is worse than the best run: --greedy leaves out runs that lower the accuracy.")
    return lines
