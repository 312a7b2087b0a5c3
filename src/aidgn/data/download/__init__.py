"""Download a data set from the first of its mirrors that works, arrange its folders and count its images."""

import importlib.util
import json
import shutil
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

from aidgn.data.download.archives import DamagedFile, Limit
from aidgn.data.download.connection import MirrorError
from aidgn.data.download.http import File, OnProgress, fetch
from aidgn.data.download.layouts import LAYOUTS, Download
from aidgn.data.download.mirrors import SOURCES, Mirror, Source
from aidgn.data.loading import load_folder
from aidgn.data.registry import DatasetInfo, get_info, normalize_name
from aidgn.data.validate import compare_counts
from aidgn.errors import AidgnError, some
from aidgn.files import FolderLock, check_no_link, translate_os_errors, write_text

SHOWN = 8  # differences in a message
MAX_LISTING = 10_000_000  # bytes


def download(
    name: str,
    data_dir: str | Path,
    *,
    on_progress: OnProgress | None = None,
    on_message: Callable[[str], None] | None = None,
    sources: Mapping[str, Source] | None = None,
    backoff: float = 1.0,
) -> Path:
    """Download a data set, unless it exists, and count its images; return its folder.

    After an interruption the same call continues. The folder appears once it is complete; until then the downloaded
    files are in DATA_DIR/.downloads.

    Args:
        name: Name of the data set.
        data_dir: Folder of data sets.
        on_progress: Called with the bytes of a file that are here and all its bytes (None: not known).
        on_message: Called with a sentence about each step, and in the end about the copy that was downloaded.
        sources: Where data sets can be downloaded.
        backoff: Seconds before a second attempt.
    """
    source = find_source(name, sources)
    data_dir = Path(data_dir)
    info = source.info
    say = on_message or (lambda text: None)
    downloads = data_dir / ".downloads" / info.name
    check_no_link(downloads.parent, downloads)
    if folder := find_existing(info, data_dir, say):
        return folder
    with translate_os_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(downloads.with_suffix(".lock"))
    if not lock.try_acquire():
        say(f"Another process is downloading {info.name}; waiting.")
        lock.acquire()
    with lock:
        if folder := find_existing(info, data_dir, say):
            return folder
        failures = []
        with translate_os_errors(downloads):  # again: the process waited for may have removed it
            downloads.mkdir(exist_ok=True)
        for mirror in source.mirrors:
            say(f"{info.name} from {mirror.title}.")
            try:
                unpacked, result = download_from(source, mirror, downloads, say, on_progress, backoff)
            except MirrorError as error:
                failures.append(f"  {mirror.title}: {error}.")
                say(f"{mirror.title} failed: {error}.")
                continue
            folder = data_dir / info.folder
            with translate_os_errors(folder):
                unpacked.rename(folder)  # replaces an empty folder of this name
            shutil.rmtree(downloads, ignore_errors=True)
            say(f"{folder} is complete: {result}.")
            return folder
    lines = [f"{info.name} could not be downloaded. Tried:", *failures, "", manual_steps(name, data_dir, sources)]
    raise AidgnError("\n".join(lines))


def manual_steps(name: str, data_dir: str | Path = "data", sources: Mapping[str, Source] | None = None) -> str:
    """Compose the steps by which a person gets the data set."""
    source = find_source(name, sources)
    info = source.info
    data_dir = Path(data_dir)
    files = "; or ".join(", ".join(file.name for file in mirror.files) for mirror in source.mirrors if mirror.files)
    classes = ", ".join(info.classes) if 0 < len(info.classes) <= 10 else f"{info.num_classes} classes"
    steps = [
        f"Get the data set from {source.page}." + (f" {source.by_hand}" if source.by_hand else ""),
        f"Either put the files, unchanged, ({files}) into {data_dir / '.downloads' / info.name} and run "
        f"`aidgn data download {info.name} --data-dir {data_dir}` again,",
        f"or make the folders {data_dir / info.folder}/<domain>/<class>/<image>, with the domains "
        f"{', '.join(info.domains)}, each with the classes ({classes}).",
        f"Then `aidgn data check {info.name} --data-dir {data_dir}` counts and reads every image.",
    ]
    return "\n".join(["By hand:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))])


def find_source(name: str, sources: Mapping[str, Source] | None) -> Source:
    """Return the mirrors of a data set, or raise an error that says where to get it."""
    known = SOURCES if sources is None else sources
    for source in known.values():
        if normalize_name(source.info.name) == normalize_name(name):
            return source
    info = get_info(name)  # an error if there is none
    if info.page:
        raise AidgnError(
            f"aidgn does not download {info.name}: get it from {info.page} and put its folder {info.folder} into the "
            "folder of data sets."
        )
    raise AidgnError(f"{info.name} comes with the package: there is nothing to download.")


def find_existing(info: DatasetInfo, data_dir: Path, say: Callable[[str], None]) -> Path | None:
    """Return the folder of the data set if there is one and it is not empty; an error if it holds something else."""
    names = {normalize_name(info.name), normalize_name(info.folder)}
    for folder in sorted(data_dir.iterdir()) if data_dir.is_dir() else ():
        if normalize_name(folder.name) in names and folder.is_dir() and any(folder.iterdir()):
            try:
                say(f"{folder} is there: {verify(folder, info)}.")
            except MirrorError as error:
                raise AidgnError(
                    f"{folder} is there, but is not {info.name} as published: {error}. Remove or rename "
                    f"it to have it downloaded; `aidgn data check {info.name}` says more."
                ) from None
            # A process that was killed after it renamed the folder leaves its downloads.
            shutil.rmtree(data_dir / ".downloads" / info.name, ignore_errors=True)
            return folder
    return None


def download_from(
    source: Source,
    mirror: Mirror,
    downloads: Path,
    say: Callable[[str], None],
    on_progress: OnProgress | None,
    backoff: float,
) -> tuple[Path, str]:
    """Download and unpack the data set from one mirror; return a temporary folder and a description of the copy."""
    if mirror.arrange == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MirrorError("its parquet files need pyarrow to be read: pip install pyarrow")
    info = source.info
    limit = Limit(2 * source.unpacked, 4 * sum(info.counts.values()) + 1000)
    paths = []
    files = mirror.files or list_repository(mirror, downloads, backoff)
    for file in files:
        say(f"Downloading {file.name}.")
        paths.append(fetch(replace(file, limit=limit.size), downloads, on_progress, backoff))
    unverified = [file.name for file in files if not file.digest]
    if unverified:
        say(f"No checksum is known of {some(unverified)}: only the numbers of images are verified.")

    say("Unpacking.")
    unpacked = downloads / "unpacked"
    with translate_os_errors(unpacked):
        if unpacked.exists():
            shutil.rmtree(unpacked)
        unpacked.mkdir()
    try:
        LAYOUTS[mirror.arrange](Download(paths, unpacked, info, mirror.names, limit))
    except DamagedFile as error:
        with translate_os_errors(error.path):
            error.path.replace(error.path.with_name(f"{error.path.name}.damaged"))
        raise
    add_empty_classes(unpacked)
    result = "; ".join(filter(None, (verify(unpacked, info), mirror.note)))
    sizes = {path.name: path.stat().st_size for path in paths}
    record = {"data set": info.name, "mirror": mirror.title, "what": result, "files": sizes}
    write_text(unpacked / ".source.json", json.dumps(record, indent=1))
    return unpacked, result


def list_repository(mirror: Mirror, downloads: Path, backoff: float) -> list[File]:
    """List the parquet files of a Hugging Face data set, with the sizes and checksums from its API."""
    path = downloads / "listing.json"
    path.unlink(missing_ok=True)
    fetch(File(path.name, (mirror.listing,), limit=MAX_LISTING), downloads, backoff=backoff)
    try:
        files = [
            File(
                PurePosixPath(item["path"]).name,
                (mirror.resolve + urllib.parse.quote(item["path"]),),
                int(item["size"]),
                f"sha256:{item['lfs']['oid']}" if item.get("lfs") else "",
            )
            for item in json.loads(path.read_bytes())
            if item["path"].endswith(".parquet")
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MirrorError(f"{mirror.listing} sent no list of files ({error!r})") from error
    if not files:
        raise MirrorError(f"{mirror.listing} lists no parquet files")
    return sorted(files, key=lambda file: file.name)


def add_empty_classes(folder: Path) -> None:
    """Make a folder for each class that a domain has no image of, so that all domains have the same folders."""
    domains = [domain for domain in folder.iterdir() if domain.is_dir()]
    for name in {label.name for domain in domains for label in domain.iterdir()}:
        for domain in domains:
            (domain / name).mkdir(exist_ok=True)


def verify(folder: Path, info: DatasetInfo) -> str:
    """Count the images per domain and class; name the published copy, or raise an error for other counts."""
    try:
        dataset = load_folder(folder, info)
    except AidgnError as error:
        raise MirrorError(str(error).rstrip(".")) from None
    copy, differences = compare_counts(dataset, info)
    if differences:
        raise MirrorError(some(differences, SHOWN, "; "))
    return str(copy)
