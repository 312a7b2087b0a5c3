"""Find pictures that spoil an estimate: labels that look wrong, and copies across sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from aidgn.analysis.extraction import extract_features
from aidgn.analysis.label_errors import DoubtfulLabel, OutOfSite, find_doubtful_labels, pool_out_of_site
from aidgn.analysis.near_copies import NearCopy, find_near_copies, picture
from aidgn.analysis.predictions import Predictions
from aidgn.data.cache import DecodedDataset
from aidgn.errors import AidgnError, plural, some
from aidgn.inference import load_model
from aidgn.inference.explanation import explain, paint
from aidgn.runs.folder import RunFolder
from aidgn.runs.inputs import choose_custom_algorithm
from aidgn.terminal import log


@dataclass(frozen=True)
class DoubtfulPictures:
    """Pictures to look at before believing an estimate."""

    labels: Sequence[DoubtfulLabel] = ()  # pictures whose label looks wrong, the most doubtful first
    # Pairs of resized, recompressed or cropped copies across sites, the most similar first
    copies: Sequence[NearCopy] = ()
    out_of_site: OutOfSite | None = None  # predictions for all pictures; None with a single site

    def sentences(self) -> list[str]:
        """Describe the doubtful labels and the copies, a sentence or two for each."""
        sentences = []
        if self.labels:
            total = f" of {len(self.out_of_site.files)}" if self.out_of_site else ""
            examples = (f"{doubt.file} (looks like {doubt.suggestion})" for doubt in self.labels)
            sentences.append(
                f"{plural(len(self.labels), 'label')}{total} doubted by models that never saw their site, the most "
                f"doubtful first: {some(examples)}. Many of these will be errors of the models, so look at the first "
                "ones; doubtful.csv has all."
            )
        if self.copies:
            pairs = (f"{copy.first} = {copy.second}" for copy in self.copies)
            sentences.append(
                f"{plural(len(self.copies), 'pair')} of pictures of different sites that look like resized, "
                f"recompressed or cropped copies, which make the estimate too high: {some(pairs)}. Remove one of each "
                "pair; copies.csv has all."
            )
        return sentences


def explain_doubts(
    doubts: Sequence[DoubtfulLabel], runs: Mapping[str, str], decoded: DecodedDataset, device: str, algorithm: str
) -> dict[str, Image.Image]:
    """Return heatmaps by file that show where a picture looks like the suggested class.

    Args:
        doubts: Pictures whose label looks wrong.
        runs: Folder of a run that never saw the site, by site.
        decoded: The pictures.
        device: Where to compute.
        algorithm: The algorithm of the fit, which may be a custom one.
    """
    numbers = {file: number for number, file in enumerate(decoded.dataset.files)}
    heatmaps: dict[str, Image.Image] = {}
    for site in dict.fromkeys(doubt.site for doubt in doubts):
        model = load_model(runs[site], device, choose_custom_algorithm(RunFolder(runs[site]).metadata, algorithm))
        shown = [doubt for doubt in doubts if doubt.site == site]
        pixels = [picture(decoded, numbers[doubt.file]) for doubt in shown]
        try:
            maps = explain(model, pixels, [model.classes.index(doubt.suggestion) for doubt in shown])
        except AidgnError as error:
            log.warning("%s", error)
            return {}
        heatmaps |= {doubt.file: paint(*pair) for doubt, *pair in zip(shown, pixels, maps, strict=True)}
    return heatmaps


def check_pictures(
    runs: Sequence[Predictions],
    final: str | Path,
    decoded: DecodedDataset,
    copies: Sequence[NearCopy] | None = None,
    **options: Any,
) -> DoubtfulPictures:
    """Find the doubtful pictures of a fit; none with a single site.

    Args:
        runs: Predictions of runs with one site unseen.
        final: Folder of the run on all sites; copies are found by its features.
        decoded: The pictures.
        copies: Copies across sites, if they are known.
        options: Arguments of `extract_features`.
    """
    if not runs:
        return DoubtfulPictures()
    if copies is None:
        features = extract_features(final, **options)
        copies = find_near_copies(decoded, features.features, options.get("on_progress"))
    out_of_site = pool_out_of_site(runs)
    return DoubtfulPictures(find_doubtful_labels(out_of_site), copies, out_of_site)
