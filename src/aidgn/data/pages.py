"""Write the pages of multi-page TIFF and DICOM files as pictures."""

from collections.abc import Callable
from pathlib import Path

from aidgn.data.folders import walk_images
from aidgn.data.images import list_pages, open_image, turn_upright
from aidgn.errors import AidgnError, FormatError
from aidgn.files import atomic_write

PAGE_LAYOUT = "{domain}/{class}/{group}"  # of the written folder, if the first one was ROOT/<domain>/<class>


def split_pages(
    folder: str | Path,
    out: str | Path,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_broken: Callable[[AidgnError], None] = lambda error: None,
) -> int:
    """Write each page of each picture below `folder` to OUT/<same folders>/<name of the file>/<page>.png.

    A file with one page gets a folder too, so that the folder of a file is a group, whose pages stay on one side of
    splits. Pages that exist are not written again.

    Args:
        folder: Folder with pictures at any depth.
        out: Where to write.
        on_progress: Called with the number of files done and of all files.
        on_broken: Called with the error of each file that cannot be read.

    Returns:
        The number of pages.
    """
    root, out = Path(folder), Path(out)
    if not root.is_dir():
        raise AidgnError(f"{root} {'is not a folder' if root.exists() else 'does not exist'}.")
    if out.resolve().is_relative_to(root.resolve()):
        raise AidgnError(f"{out} lies in {root}, where its pages would be found too: choose a folder outside.")
    files = sorted(Path(below, name) for below, name in walk_images(root, ".", []))
    count = 0
    for done, file in enumerate(files, 1):
        try:
            count += _write_pages(root / file, out / file)
        except FormatError as error:
            on_broken(AidgnError(f"{root / file} {error}"))
        except Exception as error:  # decoders fail on damaged files with exceptions of all kinds
            on_broken(AidgnError(f"{root / file} cannot be read: {error}"))
        on_progress(done, len(files))
    return count


def _write_pages(file: Path, folder: Path) -> int:
    with open_image(file) as image:
        pages = list_pages(image)
        for number, page in enumerate(pages, 1):
            path = folder / f"{number:0{len(str(len(pages)))}}.png"
            if path.exists():
                continue
            image.seek(page)
            image.load()
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary:
                turn_upright(image).save(temporary, format="PNG")
    return len(pages)
