"""Load folders with other levels than ROOT/<domain>/<class>, such as ROOT/<domain>/<patient>/<class>."""

import re
from collections import defaultdict
from pathlib import Path

from aidgn.data.dataset import Dataset
from aidgn.data.folders import walk_images
from aidgn.data.registry import normalize_unicode
from aidgn.data.source import DataSource
from aidgn.data.table import arrange
from aidgn.errors import AidgnError, ParameterError, some

DEFAULT = "{domain}/{class}"
LEVEL = re.compile(r"\{(domain|class|group)\}|\*")


def parse_layout(layout: str) -> list[str]:
    """Return the meaning of each level of folders: domain, class, group, or * for none."""
    parts = layout.strip("/").split("/")
    levels = [part.strip("{}") for part in parts]
    named = [level for level in levels if level != "*"]
    is_valid = all(LEVEL.fullmatch(part) for part in parts) and len(set(named)) == len(named)
    if not is_valid or not {"domain", "class"} <= set(levels):
        raise ParameterError(
            "layout",
            layout,
            "{domain} and {class}, once each, and perhaps {group} and *, with / between, such as "
            "{domain}/{group}/{class}",
        )
    return levels


def load_layout(source: DataSource, tolerant: bool = False) -> Dataset:
    """Load a folder with the levels of `source.layout`; folders below the last level belong to it.

    Groups of two domains are different even if they have the same name, unless groups are above domains.
    """
    root, levels = Path(source.path), parse_layout(str(source.layout))
    if not root.is_dir():
        raise AidgnError(f"{root} {'is not a folder' if root.exists() else 'does not exist'}.")
    files: list[str] = []
    values: dict[str, list[str]] = defaultdict(list)
    ignored: list[str] = []
    shallow = 0
    for below, name in walk_images(root, ".", ignored):
        folders = [normalize_unicode(folder) for folder in Path(below).parts]
        if len(folders) < len(levels):
            shallow += 1
            ignored.append(str(Path(below, name)))
            continue
        by_level = dict(zip(levels, folders, strict=False))
        if "group" in by_level and levels.index("group") > levels.index("domain"):
            by_level["group"] = f"{by_level['domain']}/{by_level['group']}"
        files.append(str(root / below / name))
        for level, value in by_level.items():
            values[level].append(value)
    if not files:
        depth = f"; {shallow} lie in fewer levels of folders" if shallow else ""
        raise AidgnError(f"{root} has no images in folders {source.layout}{depth}.")
    groups = values["group"] if "group" in levels else None
    return arrange(source, root, files, values["class"], values["domain"], groups, ignored, tolerant=tolerant)


def doubt_layout(dataset: Dataset) -> str | None:
    """Say why a folder read as ROOT/<domain>/<class> looks like another layout; None if it does not.

    Tables, folders with a given layout and data sets with a single domain are not checked.
    """
    if dataset.root is None or dataset.source is not None or len(dataset.domains) < 2 or not len(dataset):
        return None
    present = dataset.count_images() > 0
    at_one_site = bool((present.sum(0) <= 1).all())  # 0: a class without images
    inner: dict[str, set[str]] = defaultdict(set)
    for file, label in zip(dataset.files, dataset.labels.tolist(), strict=True):
        parts = file.split("/")
        inner[dataset.classes[label]].add(parts[2] if len(parts) > 3 else "")
    names = set.union(*inner.values())
    nested = "" not in names and len(names) > 1
    shared = nested and all(sum(name in folders for folders in inner.values()) > 1 for name in names)
    everywhere = nested and all(folders == names for folders in inner.values())
    as_read = f"Read as {DEFAULT}, {dataset.root} has the classes {some(dataset.classes)}"
    keep = f"If {some(dataset.classes)} are the classes, give --layout {DEFAULT}"
    if (shared and at_one_site) or everywhere:
        why = "each at one domain only, and " if at_one_site else ""
        return (
            f"{as_read}, {why}with the same folders {some(sorted(names))} in them. If {some(sorted(names))} are the "
            f"classes and {some(dataset.classes)} patients or the like, give --layout {{domain}}/{{group}}/{{class}}. "
            f"{keep}, or {DEFAULT}/{{group}} to keep images of one inner folder together in splits."
        )
    if at_one_site:
        return (
            f"{as_read}, each at one domain only, so that no domain teaches a class of another. If "
            f"{some(dataset.domains)} are the classes and {some(dataset.classes)} the domains, give "
            f"--layout {{class}}/{{domain}}. {keep}."
        )
    return None
