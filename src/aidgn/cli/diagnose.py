"""aidgn diagnose"""

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aidgn.errors import AidgnError

if TYPE_CHECKING:
    from aidgn.analysis.diagnosis import Diagnosis
    from aidgn.analysis.features import Features

POINTS = 10_000  # images that t-SNE shows at most


@click.command(
    short_help="Do angular invariance and norm shift hold here? Figures and numbers.",
    epilog="""\b
Examples:
  aidgn diagnose runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn diagnose ERM_RUN AIDGN_RUN
  aidgn diagnose features.npz --no-figures
Written: RUN/diagnosis.json and RUN/figures/ (PNG and SVG); for FILE.npz, the same in FILE/.""",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN|FILE...")
@click.option(
    "--permutations",
    default=999,
    show_default=True,
    type=click.IntRange(min=99),
    metavar="N",
    help="Permutations of the domains that p-values are counted from.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Of permutations, of samples and of t-SNE.")
@click.option("--no-figures", is_flag=True, help="Numbers only; t-SNE takes longer than all the rest.")
@click.option("--data", metavar="DIR", help="The data set's folder  [default: where the training found it].")
@click.option(
    "--algorithm",
    multiple=True,
    metavar="FILE.py:CLASS",
    help="Where the class is, if an algorithm is your own; repeatable.",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
def diagnose(
    runs: tuple[str, ...],
    permutations: int,
    seed: int,
    no_figures: bool,
    data: str | None,
    algorithm: tuple[str, ...],
    device: str,
) -> None:
    """Do the paper's two assumptions hold in RUN, a finished run, or in a file of features? With several runs, ERM's
    and AIDGN's for example, they are compared.

    Angular invariance: within a class, feature directions are distributed alike in every domain. Norm shift: feature
    norms are not. Sources are represented by the images set aside, the unseen domain by all."""
    from aidgn.analysis.diagnosis import diagnose as diagnose_features
    from aidgn.runs.folder import RunFolder

    found: list[tuple[Path, Features, Diagnosis]] = []
    for given in map(Path, runs):
        features, folder = open_features(given, data, algorithm, device, draw=not no_figures)
        diagnosis = diagnose_features(features, permutations=permutations, seed=seed)
        diagnosis.save(RunFolder(folder).diagnosis)
        found.append((folder, features, diagnosis))
    say([diagnosis for _, _, diagnosis in found], [folder for folder, _, _ in found])
    figures = [] if no_figures else draw_figures([(folder, features) for folder, features, _ in found], seed)
    for folder, _, _ in found:
        click.echo(
            f"Written: {RunFolder(folder).diagnosis}"
            + (
                f", {sum(path.parent.parent == folder for path in figures)} figures in {folder / 'figures'}"
                if figures
                else ""
            )
        )


def open_features(
    given: Path, data: str | None, algorithm: tuple[str, ...], device: str, draw: bool
) -> "tuple[Features, Path]":
    """Features of a run or a file, and the folder that what is found goes to."""
    from aidgn.analysis.extraction import extract_features
    from aidgn.analysis.features import Features
    from aidgn.cli.display import RunDisplay
    from aidgn.runs.folder import RunFolder

    if given.is_file() and given.suffix in (".npz", ".parquet"):
        run = RunFolder(given.parent)
        of_run = run.exists and run.model.is_file()
        return Features.load(given, given.parent if of_run else None), given.parent if of_run else given.with_suffix("")
    if not given.is_dir():
        raise AidgnError(
            f"{given} {'is something else' if given.exists() else 'does not exist'}: expected the folder "
            "of a finished run, or a file of features (.npz or .parquet) that `aidgn features` wrote."
        )
    if draw and RunFolder(given).exists and not RunFolder(given).model.is_file():
        curves = draw_curves(given)
        raise AidgnError(
            f"The run {given} is not finished, so it has no features to diagnose. "
            + (f"Its curves so far are in {curves[0]}. " if curves else "It has no records yet either. ")
            + "The `aidgn train` command that started it goes on with it."
        )
    with RunDisplay() as display:
        return extract_features(given, data=data, device=device, algorithm=algorithm, on_progress=display.update), given


def say(diagnoses: "Sequence[Diagnosis]", folders: Sequence[Path]) -> None:
    """One run in sentences; several side by side in a table."""
    from rich.table import Table

    from aidgn.analysis.diagnosis import compare
    from aidgn.cli.display import Output
    from aidgn.runs.differences import differences
    from aidgn.runs.folder import RunFolder
    from aidgn.selection import read_runs

    columns = min(shutil.get_terminal_size((120, 24)).columns, 120)

    def echo(line: str) -> None:
        click.echo(textwrap.fill(line, columns, subsequent_indent="    "))

    if len(diagnoses) == 1:
        for line in diagnoses[0].sentences():
            echo(line)
        return
    names = [one.algorithm for one in diagnoses]
    if len(set(names)) < len(names):
        names = [folder.name for folder in folders]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(", ".join(dict.fromkeys(one.dataset for one in diagnoses)))
    for name in names:
        table.add_column(name, overflow="fold")
    for label, values in compare(diagnoses):
        table.add_row(label, *values)
    Output(width=columns, height=25, highlight=False).print(table, markup=False)
    for name, one in zip(names, diagnoses, strict=True):
        echo(f"{name}. {one.meaning()}")
    for line in dict.fromkeys(line for one in diagnoses for line in one.tested()):
        echo(line)
    if len({(one.dataset, *one.targets, one.trial) for one in diagnoses}) > 1:
        echo(
            "These runs are of different data, unseen domains or trials: differences between them are not the "
            "algorithms' alone."
        )
    trained = [folder for folder in folders if RunFolder(folder).results.is_file()]
    for difference in differences(read_runs(*trained).runs) if len(trained) > 1 else ():
        echo(str(difference))


def draw_figures(runs: "Sequence[tuple[Path, Features]]", seed: int) -> list[Path]:
    """The figures of each run into its folder, and where there are several with the same unseen domain, their latent
    spaces side by side."""
    from aidgn.analysis.embedding import subsample, tsne
    from aidgn.report import figures
    from aidgn.report.adaptation import comparable
    from aidgn.runs.reader import read_adaptation

    written, spaces, adapted = [], [], []
    for folder, features in runs:
        place = folder / "figures"
        where = subsample(features, POINTS, seed)
        click.echo(f"t-SNE of {len(where)} images", err=True)
        spaces.append((features, where, tsne(features.features[where], seed=seed)))
        drawn: dict[str, Any] = {
            "latent-space": figures.latent_space(spaces[-1:]),
            "norms": figures.norm_distributions(features),
            "angles": figures.angle_distributions(features),
            "confusion": figures.confusion_matrix(features),
        }
        for name, figure in drawn.items():
            written.append(figures.save(figure, place, name)[0])
        written += draw_curves(folder)
        adapted += read_adaptation(folder, features.model)
    first = runs[0][0] / "figures"
    if len(spaces) > 1 and len({(of.dataset, *of.targets, *of.domain_names) for _, of in runs}) == 1:
        name = "latent-space-" + "-".join(features.algorithm for _, features in runs)
        written.append(figures.save(figures.latent_space(spaces), first, name)[0])
    if compared := comparable(adapted):
        written.append(figures.save(figures.adaptation_bars(compared), first, "adaptation")[0])
    return written


def draw_curves(folder: Path) -> list[Path]:
    """Training curves of a run, finished or not, where it has records."""
    from aidgn.report import figures
    from aidgn.runs.folder import RunFolder
    from aidgn.selection import load_records

    if not RunFolder(folder).records:
        return []
    return figures.save(figures.training_curves(list(load_records(folder))), folder / "figures", "curves")[:1]
