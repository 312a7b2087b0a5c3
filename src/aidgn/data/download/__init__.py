"""Get a data set: from the first of its mirrors that works, arranged as a data set, its images counted."""

import importlib.util
import json
import shutil
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from aidgn.data.dataset import load_folder
from aidgn.data.download.archives import ARRANGE, BadFile, Limit
from aidgn.data.download.http import File, MirrorError, OnProgress, fetch, storing
from aidgn.data.download.mirrors import SOURCES, Mirror, Source
from aidgn.data.registry import DatasetInfo, get_info, normalize_name
from aidgn.data.validate import compare_counts
from aidgn.errors import AidgnError, some
from aidgn.files import lock, open_no_link, write_text

SHOWN = 8  # differences in a message


def download(
    name: str,
    data_dir: str | Path,
    *,
    on_progress: OnProgress | None = None,
    on_message: Callable[[str], None] | None = None,
    sources: Mapping[str, Source] | None = None,
    backoff: float = 1.0,
) -> Path:
    """The data set's folder below `data_dir`, downloaded if it is not there, with every image counted.

    `on_progress(done, total)` tells the bytes of the file under way (total None: not known), `on_message` what is
    being done and in the end which copy this is. Interrupted, even killed, the same call continues where it was.
    The folder appears only when it is complete; what it is made from is in DATA_DIR/.downloads until then.
    """
    source, data_dir = find_source(name, sources), Path(data_dir)
    info, say = source.info, on_message or (lambda text: None)
    downloads = data_dir / ".downloads" / info.name
    if folder := existing(info, data_dir, say):
        return folder
    with storing(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
    with locked(downloads.with_suffix(".lock"), lambda: say(f"Another process is downloading {info.name}; waiting.")):
        if folder := existing(info, data_dir, say):
            return folder
        failures = []
        with storing(downloads):  # again: the process waited for may have removed it
            downloads.mkdir(exist_ok=True)
        for mirror in source.mirrors:
            say(f"{info.name} from {mirror.title}.")
            try:
                unpacked, result = obtain(source, mirror, downloads, say, on_progress, backoff)
            except MirrorError as error:
                failures.append(f"  {mirror.title}: {error}.")
                say(f"{mirror.title} failed: {error}.")
                continue
            folder = data_dir / info.folder
            with storing(folder):
                unpacked.rename(folder)  # an empty folder of this name gives way
            shutil.rmtree(downloads, ignore_errors=True)
            say(f"{folder} is complete: {result}.")
            return folder
    raise AidgnError(
        "\n".join(
            [f"{info.name} could not be downloaded. Tried:", *failures, "", manual_steps(name, data_dir, sources)]
        )
    )


def manual_steps(name: str, data_dir: str | Path = "data", sources: Mapping[str, Source] | None = None) -> str:
    """How a person gets the data set without us."""
    source = find_source(name, sources)
    info, data_dir = source.info, Path(data_dir)
    files = "; or ".join(", ".join(file.name for file in mirror.files) for mirror in source.mirrors if mirror.files)
    classes = ", ".join(info.classes) if 0 < len(info.classes) <= 10 else f"{info.num_classes} classes"
    steps = [
        f"Get the data set from {source.page}." + (f" {source.by_hand}" if source.by_hand else ""),
        f"Either put the files as they are ({files}) into {data_dir / '.downloads' / info.name} and run "
        f"`aidgn data download {info.name} --data-dir {data_dir}` again,",
        f"or make the layout {data_dir / info.folder}/<domain>/<class>/<image>, with the domains "
        f"{', '.join(info.domains)}, in each the classes ({classes}).",
        f"Then `aidgn data check {info.name} --data-dir {data_dir}` counts and reads every image.",
    ]
    return "\n".join(["By hand:", *(f"  {number}. {step}" for number, step in enumerate(steps, 1))])


def find_source(name: str, sources: Mapping[str, Source] | None) -> Source:
    known = SOURCES if sources is None else sources
    for source in known.values():
        if normalize_name(source.info.name) == normalize_name(name):
            return source
    info = get_info(name)  # or it says that there is none
    raise AidgnError(f"{info.name} comes with the package: there is nothing to download.")


@contextmanager
def locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """One process at a time; the lock ends with the process, however that ends."""
    with storing(path):
        file = open_no_link(path, "w")
    with file:
        if not lock(file, path.parent, wait=False):
            on_wait()
            lock(file, path.parent, wait=True)
        yield


def existing(info: DatasetInfo, data_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The folder of the data set that is there already, unless it is empty; an error if it holds something else."""
    names = {normalize_name(info.name), normalize_name(info.folder)}
    for folder in sorted(data_dir.iterdir()) if data_dir.is_dir() else ():
        if normalize_name(folder.name) in names and folder.is_dir() and any(folder.iterdir()):
            try:
                say(f"{folder} is there: {verify(folder, info)}.")
            except MirrorError as error:
                raise AidgnError(
                    f"{folder} is there, but is not {info.name} as published: {error}. Remove or rename "
                    f"it to have it downloaded; `aidgn data check {info.name}` tells more."
                ) from None
            shutil.rmtree(data_dir / ".downloads" / info.name, ignore_errors=True)  # if it was killed just before
            return folder
    return None


def obtain(
    source: Source,
    mirror: Mirror,
    downloads: Path,
    say: Callable[[str], None],
    on_progress: OnProgress | None,
    backoff: float,
) -> tuple[Path, str]:
    """The data set from one mirror in a folder of its own, and what it is in words."""
    if mirror.arrange == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise MirrorError("its parquet files need pyarrow to be read: pip install pyarrow")
    info, images = source.info, sum(source.info.counts.values())
    paths = []
    for file in mirror.files or list_repository(mirror, downloads, backoff):
        say(f"Downloading {file.name}.")
        paths.append(fetch(file, downloads, on_progress, backoff))

    say("Unpacking.")
    unpacked = downloads / "unpacked"
    with storing(unpacked):
        if unpacked.exists():
            shutil.rmtree(unpacked)
        unpacked.mkdir()
    try:
        made = ARRANGE[mirror.arrange](
            paths, unpacked, info, mirror.names, Limit(2 * source.unpacked, 4 * images + 1000)
        )
    except BadFile as error:
        with storing(error.path):
            error.path.replace(error.path.with_name(f"{error.path.name}.damaged"))
        raise
    same_classes(unpacked)
    result = verify(unpacked, info) + (f"; {made}" if made else "") + (f"; {mirror.note}" if mirror.note else "")
    write_text(
        unpacked / ".source.json",
        json.dumps(
            {
                "data set": info.name,
                "mirror": mirror.title,
                "what": result,
                "files": {path.name: path.stat().st_size for path in paths},
            },
            indent=1,
        ),
    )
    return unpacked, result


def list_repository(mirror: Mirror, downloads: Path, backoff: float) -> list[File]:
    """The parquet files of a Hugging Face data set with size and checksum, as its API lists them."""
    path = downloads / "listing.json"
    path.unlink(missing_ok=True)
    fetch(File(path.name, (mirror.listing,)), downloads, backoff=backoff)
    try:
        files = [
            File(
                PurePosixPath(item["path"]).name,
                (mirror.resolve + urllib.parse.quote(item["path"]),),
                item["size"],
                f"sha256:{item['lfs']['oid']}" if item.get("lfs") else "",
            )
            for item in json.loads(path.read_bytes())
            if item["path"].endswith(".parquet")
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MirrorError(f"{mirror.listing} sent no list of files ({error!r})") from error
    if not files:
        raise MirrorError(f"{mirror.listing} lists no parquet files")
    return sorted(files, key=lambda file: file.name)


def same_classes(folder: Path) -> None:
    """An empty folder where a domain has no image of a class, so that all domains have the same."""
    domains = [domain for domain in folder.iterdir() if domain.is_dir()]
    for name in {label.name for domain in domains for label in domain.iterdir()}:
        for domain in domains:
            (domain / name).mkdir(exist_ok=True)


def verify(folder: Path, info: DatasetInfo) -> str:
    """Count the images per domain and class. Returns which published copy it is; other counts are an error."""
    try:
        dataset = load_folder(folder, info)
    except AidgnError as error:
        raise MirrorError(str(error).rstrip(".")) from None
    copy, differences = compare_counts(dataset, info)
    if differences:
        raise MirrorError(some(differences, SHOWN, "; "))
    return str(copy)
