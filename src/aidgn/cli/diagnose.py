"""aidgn diagnose"""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aidgn.cli.options import custom_algorithms_option, data_option, device_option
from aidgn.errors import AidgnError

if TYPE_CHECKING:
    from aidgn.analysis.diagnosis import Diagnosis
    from aidgn.analysis.features import Features


@click.command(
    epilog="""\b
Examples:
  aidgn diagnose runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn diagnose ERM_RUN AIDGN_RUN
  aidgn diagnose features.npz --no-figures
Writes RUN/diagnosis.json and RUN/figures/ (PNG and SVG), or the same below FILE/ for FILE.npz.""",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN|FILE...")
@click.option(
    "--permutations",
    default=999,
    type=click.IntRange(min=99),
    metavar="N",
    help="Compute p-values from N permutations of the domains.",
)
@click.option("--seed", default=0, metavar="N", help="Seed of permutations, samples and t-SNE.")
@click.option("--no-figures", is_flag=True, help="Write only the numbers and skip t-SNE, the slowest part.")
@data_option
@custom_algorithms_option
@device_option
def diagnose(
    runs: tuple[str, ...],
    permutations: int,
    seed: int,
    no_figures: bool,
    **options: Any,
) -> None:
    """Test the paper's two assumptions on RUN, a finished run, or on a FILE of features. Several runs, such as ERM's
    and AIDGN's, are compared.

    Angular invariance: within a class, feature directions have the same distribution in every domain. Norm shift:
    feature norms do not. A source domain is represented by its validation images, the unseen domain by all images."""
    from threadpoolctl import threadpool_limits

    from aidgn.analysis.diagnosis import diagnose as diagnose_features
    from aidgn.report.run_figures import draw_diagnosed, embed_ahead
    from aidgn.runs.folder import RunFolder

    features = [_open_features(path, not no_figures, **options) for path in map(Path, runs)]
    folders = [folder for folder, _ in features]
    diagnoses: list[Diagnosis] = []
    figures: list[Path] = []
    with threadpool_limits(1):  # another thread computes t-SNE meanwhile
        if not no_figures:
            embed_ahead([of_run for _, of_run in features], seed)
        for folder, of_run in features:
            diagnoses.append(diagnose_features(of_run, permutations=permutations, seed=seed))
            diagnoses[-1].save(RunFolder(folder).diagnosis)
        _print_diagnoses(diagnoses, folders)
        if not no_figures:
            figures = draw_diagnosed(features, seed, lambda message: click.echo(message, err=True))
    for folder in folders:
        run = RunFolder(folder)
        number = sum(path.parent == run.figures for path in figures)
        click.echo(f"Written: {run.diagnosis}" + (f", {number} figures in {run.figures}" if figures else ""))


def _open_features(path: Path, draw: bool, **options: Any) -> "tuple[Path, Features]":
    """Return the folder for the results and the features of a run or a file."""
    from aidgn.analysis.extraction import extract_features
    from aidgn.analysis.features import Features
    from aidgn.progress import RunDisplay
    from aidgn.report.run_figures import draw_curves
    from aidgn.runs.folder import RunFolder

    if path.is_file() and path.suffix in (".npz", ".parquet"):
        run = RunFolder(path.parent)
        if run.exists and run.model.is_file():
            return run.path, Features.load(path, run.path)
        return path.with_suffix(""), Features.load(path)
    if not path.is_dir():
        raise AidgnError(
            f"{path} {'is something else' if path.exists() else 'does not exist'}: expected the folder of a finished "
            "run, or a file of features (.npz or .parquet) that `aidgn features` wrote."
        )
    if draw and RunFolder(path).exists and not RunFolder(path).model.is_file():
        curves = draw_curves(path)
        raise AidgnError(
            f"The run {path} is not finished, so it has no features to diagnose. "
            + (f"Its curves so far are in {curves[0]}. " if curves else "It has no records yet either. ")
            + "The `aidgn train` command that started it continues it."
        )
    with RunDisplay() as display:
        return path, extract_features(path, on_progress=display.update, **options)


def _print_diagnoses(diagnoses: "Sequence[Diagnosis]", folders: Sequence[Path]) -> None:
    """Print one run in sentences, several side by side in a table."""
    from rich.table import Table
    from rich.text import Text

    from aidgn.analysis.summary import compare, describe_fixed_norm, meaning, sentences, tested
    from aidgn.progress import Output
    from aidgn.runs.differences import differences
    from aidgn.runs.folder import RunFolder
    from aidgn.runs.reader import read_runs

    columns = min(shutil.get_terminal_size((120, 24)).columns, 120)

    def echo(line: object) -> None:
        click.echo(textwrap.fill(str(line), columns, subsequent_indent="    "))

    # A file of features without a run does not name its network.
    metadata = [RunFolder(folder).metadata for folder in folders if RunFolder(folder).exists]
    notes = [describe_fixed_norm(str(run.identity["backbone"]), run.image_size) for run in metadata]
    fixed_norms = list(filter(None, dict.fromkeys(notes)))
    if len(diagnoses) == 1:
        for line in [*sentences(diagnoses[0]), *fixed_norms]:
            echo(line)
        return
    names = [diagnosis.algorithm for diagnosis in diagnoses]
    if len(set(names)) < len(names):
        names = [folder.name for folder in folders]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(", ".join(dict.fromkeys(diagnosis.dataset for diagnosis in diagnoses)))
    for name in names:
        table.add_column(Text(name), overflow="fold")
    for label, values in compare(diagnoses):
        table.add_row(label, *map(Text, values))
    Output(width=columns, height=25, highlight=False).print(table, markup=False)
    for name, diagnosis in zip(names, diagnoses, strict=True):
        echo(f"{name}. {meaning(diagnosis)}")
    for line in [*fixed_norms, *dict.fromkeys(line for diagnosis in diagnoses for line in tested(diagnosis))]:
        echo(line)
    if len({(diagnosis.dataset, *diagnosis.targets, diagnosis.trial) for diagnosis in diagnoses}) > 1:
        echo("These runs are of different data, unseen domains or trials, so not only their algorithms differ.")
    trained = [folder for folder in folders if RunFolder(folder).results.is_file()]
    if len(trained) > 1:
        for difference in differences(read_runs(*trained).runs):
            echo(difference)
