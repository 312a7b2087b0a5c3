"""What a run is called, from its identity alone: what run.json says makes it this run."""

import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from aidgn.data.registry import is_registered, normalize_name


def folder_name(identity: Mapping[str, Any]) -> str:
    """A readable name with a digest of the whole identity."""
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


def sweep_key(identity: Mapping[str, Any]) -> str:
    """`RunSpec.key` from the identity in a run.json."""
    known = {key: value for key, value in identity.items() if key not in ("data", "weights", "precision")}
    name = normalize_name(known["dataset"])
    folder = name.removeprefix("own")  # of an own data set that is called as a published one
    return folder_name({**known, "dataset": folder if is_registered(folder) else name})
