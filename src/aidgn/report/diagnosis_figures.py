"""The figure files of diagnosed runs."""

from collections.abc import Callable, Sequence
from pathlib import Path

from aidgn.analysis.embedding import subsample, tsne
from aidgn.analysis.features import Features
from aidgn.report.adaptation import comparable
from aidgn.report.feature_figures import (
    Space,
    angle_distributions,
    confusion_matrix,
    latent_space,
    norm_distributions,
)
from aidgn.report.figures import save
from aidgn.report.run_figures import adaptation_bars, training_curves
from aidgn.runs.folder import RunFolder
from aidgn.runs.reader import read_adaptation

MAX_POINTS = 10_000  # images that t-SNE shows


def draw_diagnosed(
    runs: Sequence[tuple[Path, Features]], seed: int = 0, on_message: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Draw the figures of each run into FOLDER/figures.

    The first folder also gets the latent spaces side by side, if all runs have the same unseen domain, and the
    accuracies under adaptation, if the runs were adapted.

    Args:
        runs: Folders and the features of their runs.
        seed: Seed of samples and of t-SNE.
        on_message: Called before work that takes long.

    Returns:
        The PNG files.
    """
    written: list[Path] = []
    spaces: list[Space] = []
    adapted = []
    for folder, features in runs:
        images = subsample(features, MAX_POINTS, seed)
        on_message(f"t-SNE of {len(images)} images")
        spaces.append((features, images, tsne(features.features[images], seed=seed)))
        place = RunFolder(folder).figures
        written += [
            save(latent_space(spaces[-1:]), place, "latent-space")[0],
            save(norm_distributions(features), place, "norms")[0],
            save(angle_distributions(features), place, "angles")[0],
            save(confusion_matrix(features), place, "confusion")[0],
            *draw_curves(folder),
        ]
        adapted += read_adaptation(folder, features.model)
    first = RunFolder(runs[0][0]).figures
    alike = len({(features.dataset, *features.targets, *features.domain_names) for _, features in runs}) == 1
    if len(spaces) > 1 and alike:
        name = "latent-space-" + "-".join(features.algorithm for _, features in runs)
        written.append(save(latent_space(spaces), first, name)[0])
    if compared := comparable(adapted):
        written.append(save(adaptation_bars(compared), first, "adaptation")[0])
    return written


def draw_curves(folder: Path) -> list[Path]:
    """Draw the training curves of a run, finished or not, if it has records."""
    run = RunFolder(folder)
    return [save(training_curves(run.records), run.figures, "curves")[0]] if run.records else []
