"""Compose the names of a run from its identity: the settings in run.json that distinguish it from other runs."""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from aidgn.data.registry import is_registered, normalize_name

# Parts of an identity that depend on images, weights or the machine. The key of a run within a sweep leaves them out.
OF_FILES = ("data", "weights", "precision", "preprocessing")


def folder_name(identity: Mapping[str, Any]) -> str:
    """Compose a readable name with a digest of the whole identity."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    parts = [
        identity["dataset"],
        identity["algorithm"],
        "+".join(identity["target"]) or "all",
        f"trial{identity['trial']}",
        f"draw{identity['draw']}",
        digest,
    ]
    name = "-".join("".join(c if c.isalnum() or c in "+_." else "_" for c in part) for part in parts)
    names = sys.getfilesystemencoding()  # ASCII, if the locale has it so
    return name.encode(names, "replace").decode(names).replace("?", "_")


def identify_images(fingerprint: str, content: str) -> str:
    """Return the identity of a run's images from the fingerprint of a data set and the digest of its images.

    Args:
        fingerprint: `Dataset.fingerprint`, of names.
        content: `DecodedDataset.content`; "" before images are decoded gives the beginning of the identity.
    """
    return f"{fingerprint[:32]}-{content}"


def without_preprocessing(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's identity in version 0.1.0, which normalised every image by ImageNet's statistics."""
    return {key: value for key, value in identity.items() if key != "preprocessing"}


def sweep_key(identity: Mapping[str, Any]) -> str:
    """Return the result of `RunSpec.key` from the identity in a run.json."""
    known = {key: value for key, value in identity.items() if key not in OF_FILES}
    name = normalize_name(known["dataset"])
    folder = name.removeprefix("own")  # the prefix of a user's data set that is named like a published one
    return folder_name({**known, "dataset": folder if is_registered(folder) else name})
