"""Features of which the truth is known: classes are von Mises-Fisher, norms are gamma distributed, and the last domain,
unseen, differs by as much as is asked for."""

from collections.abc import Callable

import numpy as np
import pytest

from aidgn.analysis.features import Features
from aidgn.theory import vmf_sample


@pytest.fixture(scope="session")
def synthetic() -> Callable[..., Features]:
    def make(
        seed: int = 0,
        *,
        n: int = 32,
        classes: int = 4,
        domains: int = 4,
        images: int = 20,
        kappa: float = 60.0,
        turn: float = 0.0,
        stretch: float = 1.0,
    ) -> Features:
        """`turn`: radians that the unseen domain's class directions are turned by; `stretch`: factor of its norms,
        whose standard deviation is a quarter of their mean."""
        rng = np.random.default_rng(seed)
        axes = np.linalg.qr(rng.standard_normal((n, 2 * classes)))[0].T
        z, labels, ids = [], [], []
        for domain in range(domains):
            unseen = domain == domains - 1
            for number in range(classes):
                angle = turn if unseen else 0.0
                direction = np.cos(angle) * axes[number] + np.sin(angle) * axes[classes + number]
                norms = rng.gamma(16, 20 / 16, images) * (stretch if unseen else 1)
                z.append(vmf_sample(direction, kappa, images, rng) * norms[:, None])
                labels += [number] * images
                ids += [domain] * images
        features = np.concatenate(z).astype(np.float32)
        weight = axes[:classes].T.astype(np.float32)
        logits = 10 * features / np.linalg.norm(features, axis=1, keepdims=True) @ weight
        count = len(labels)
        return Features(
            features,
            logits.astype(np.float32),
            np.array(labels),
            np.array(ids),
            np.ones(count, bool),
            [f"{i}.png" for i in range(count)],
            [f"class {i}" for i in range(classes)],
            [f"seen {i}" for i in range(domains - 1)] + ["unseen"],
            ["unseen"],
            weight,
            10.0,
            "synthetic",
            "AIDGN",
            0,
            0,
            "0" * 64,
        )

    return make
