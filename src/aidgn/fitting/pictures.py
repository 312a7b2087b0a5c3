"""Pictures that spoil an estimate: labels that look wrong, and copies across sites."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aidgn.analysis.extraction import extract_features
from aidgn.analysis.label_errors import DoubtfulLabel, find_doubtful_labels
from aidgn.analysis.near_copies import NearCopy, find_near_copies
from aidgn.analysis.predictions import Predictions
from aidgn.data.cache import DecodedDataset
from aidgn.errors import plural, some


@dataclass(frozen=True)
class DoubtfulPictures:
    """Pictures to look at before believing an estimate.

    Args:
        labels: Pictures whose label looks wrong, the most doubtful first.
        copies: Pairs of resized, recompressed or cropped copies across sites, the most similar first.
    """

    labels: Sequence[DoubtfulLabel] = ()
    copies: Sequence[NearCopy] = ()

    def sentences(self) -> list[str]:
        """Describe the pictures, a sentence or two for each kind."""
        sentences = []
        if self.labels:
            examples = (f"{doubt.file} (looks like {doubt.suggestion})" for doubt in self.labels)
            sentences.append(
                f"{plural(len(self.labels), 'label')} doubted by models that never saw their site, the most doubtful "
                f"first: {some(examples)}. Many of these will be errors of the models, so look at the first ones; "
                "doubtful.csv has all."
            )
        if self.copies:
            pairs = (f"{copy.first} = {copy.second}" for copy in self.copies)
            sentences.append(
                f"{plural(len(self.copies), 'pair')} of pictures of different sites that look like resized, "
                f"recompressed or cropped copies, which make the estimate too high: {some(pairs)}. Remove one of each "
                "pair; copies.csv has all."
            )
        return sentences


def check_pictures(
    runs: Sequence[Predictions], final: str | Path, decoded: DecodedDataset, **options: Any
) -> DoubtfulPictures:
    """Find the doubtful pictures of a fit; none with a single site.

    Args:
        runs: Predictions of runs with one site unseen.
        final: Folder of the run on all sites, whose features find copies.
        decoded: The pictures.
        options: Arguments of `extract_features`.
    """
    if not runs:
        return DoubtfulPictures()
    features = extract_features(final, **options)
    copies = find_near_copies(decoded, features.features, options.get("on_progress"))
    return DoubtfulPictures(find_doubtful_labels(runs), copies)
