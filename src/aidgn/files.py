"""Atomic writes (to a temporary file in the same folder, which is then renamed), folder locks, temporary folders."""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import IO, TYPE_CHECKING, Any, Union, get_args, get_origin

from aidgn.errors import AidgnError

if TYPE_CHECKING:
    from torch import Tensor


MAX_DEPTH = 32  # levels of nested objects and lists in JSON
TEMP_NAME = re.compile(r"\..+\.tmp|\.tmp\w{6}")  # names of our temporary files and of those of safetensors
ABANDONED_SECONDS = 3600.0  # a temporary file that was not written for so long has no writer


class StorageError(AidgnError):
    """A file cannot be written: the disk is full or the folder is read-only. Every later write would fail as well."""


def open_no_link(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file, but do not follow symbolic links, and do not write to a file with several hard links.

    A folder from someone else must not choose the file that is written. Modes that truncate are not supported.
    """

    def opener(name: str, flags: int) -> int:
        file = os.open(name, flags | os.O_NOFOLLOW, 0o666)
        if flags & (os.O_WRONLY | os.O_RDWR) and os.fstat(file).st_nlink > 1:
            os.close(file)
            raise OSError(errno.EMLINK, "the file has a second name (a hard link), which would change too", name)
        return file

    return open(path, mode, opener=opener, **options)


def check_no_link(*folders: Path) -> None:
    """Raise an error if a folder is a symbolic link.

    A folder from someone else must not choose the folder in which files are removed.
    """
    for folder in folders:
        if folder.is_symlink():
            raise storage_error(folder, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; rename it to `path` if the block succeeds, remove it if not.

    The data reaches the disk before the name does (fsync), so that `path` holds either its old content or the new.
    Devices and pipes, such as /dev/null, are written directly.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if path.parent == Path("/dev") or (path.exists() and not path.is_file()):
            yield path  # a device or pipe cannot be replaced by renaming
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)  # may be a link
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except BrokenPipeError:  # the reader of standard output, or of the pipe at `path`, is gone
        raise
    except OSError as error:
        raise storage_error(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def remove_temp_files(folder: Path, *, in_use: bool = False) -> None:
    """Remove the temporary files that killed processes left in a folder.

    Args:
        folder: The folder, which need not exist.
        in_use: Whether other processes may be writing there; then only old files are removed.
    """
    for path in folder.glob(".*tmp*"):
        if TEMP_NAME.fullmatch(path.name):
            with suppress(FileNotFoundError):
                if not in_use or time.time() - path.lstat().st_mtime > ABANDONED_SECONDS:
                    path.unlink()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yield a temporary folder, removed at the end. Remove those that killed processes of this user left, too.

    A process holds a lock on its folder, which the system releases however the process ends.

    Args:
        prefix: Beginning of the folder's name; folders of other programs must not have it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), ExitStack() as locks:
            _lock_folder(left, fcntl.LOCK_EX | fcntl.LOCK_NB, locks)
            shutil.rmtree(left, ignore_errors=True)
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name, ExitStack() as locks:
            try:
                _lock_folder(Path(name), fcntl.LOCK_EX, locks)
            except FileNotFoundError:  # another process took it for a left-over and removed it
                continue
            yield Path(name)
            return


def _lock_folder(path: Path, operation: int, locks: ExitStack) -> None:
    """Lock a folder of this user until `locks` closes; FileNotFoundError if another process removed it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    locks.callback(os.close, descriptor)
    if os.fstat(descriptor).st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(path))
    fcntl.flock(descriptor, operation)
    path.stat()


@contextmanager
def written_at_last(path: Path) -> Iterator[IO[str]]:
    """Open a text file that becomes `path` if the block succeeds.

    The file has no name until then, so that a killed process leaves no temporary file.
    """
    text_options: dict[str, Any] = {"encoding": "utf-8", "errors": "surrogateescape", "newline": ""}
    with atomic_write(path) as target:
        if target == path:  # a device or a pipe
            with path.open("w", **text_options) as file:
                yield file
            return
        with open(_open_unnamed(target), "w+", **text_options) as file:
            yield file
            file.flush()
            try:
                os.link(f"/proc/self/fd/{file.fileno()}", target, follow_symlinks=True)
            except OSError:  # this system cannot give it a name
                file.seek(0)
                with target.open("w", **text_options) as whole:
                    shutil.copyfileobj(file, whole)


def _open_unnamed(path: Path) -> int:
    """Open a new file without a name, on the file system of `path`."""
    with suppress(AttributeError, OSError):  # not all systems can
        return os.open(path.parent, os.O_TMPFILE | os.O_RDWR, 0o666)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    path.unlink()
    return descriptor


def write_text(path: Path, text: str) -> None:
    """Write text in UTF-8. Undecodable bytes of file names become "?"."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


def link_or_copy(file: Path, path: Path) -> None:
    """Give a file a second name, or copy it where the file system has no hard links."""
    with atomic_write(path) as temporary:
        try:
            os.link(file, temporary)
        except OSError:
            shutil.copyfile(file, temporary)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from a file that may come from others; raise ValueError if it is nested deeper than our files."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    if sum(map(text.count, brackets)) > MAX_DEPTH:  # type: ignore[arg-type]
        level = [value]
        for _ in range(MAX_DEPTH):
            level = [inner for outer in level for inner in _children(outer)]
        if level:
            raise ValueError("it is nested too deeply")
    return value


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [entry for entry in value if isinstance(entry, dict | list)] if isinstance(value, list) else []


def is_of_type(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has a type such as `list[str] | None`.

    A boolean is not a number here, and an integer is a float.
    """
    if get_origin(hint) in (Union, UnionType):
        return any(is_of_type(value, option) for option in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(is_of_type(entry, get_args(hint)[0]) for entry in value)
    expected = get_origin(hint) or hint
    return expected is Any or type(value) is expected or (expected is float and type(value) is int)


def for_json(value: Any) -> Any:
    """Convert a value for JSON: NaN and infinity to null, NumPy scalars to Python numbers."""
    if isinstance(value, Mapping):
        return {str(key): for_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [for_json(entry) for entry in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


class FolderLock:
    """A lock between processes on a folder. The system releases it when the process that holds it ends.

    Args:
        path: The lock file in the folder. It is created and not removed.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file: IO[Any] | None = None

    def acquire(self, *, shared: bool = False) -> None:
        """Wait for the lock; with `shared`, other processes may share it."""
        self._flock(fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_acquire(self) -> bool:
        """Take the lock unless another process holds it; return whether it was taken."""
        try:
            self._flock(fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None

    def __enter__(self) -> "FolderLock":
        if self.file is None:
            self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _flock(self, operation: int) -> None:
        if self.file is None:
            with translate_os_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = open_no_link(self.path, "a")
        try:
            fcntl.flock(self.file, operation)
        except BlockingIOError:
            raise
        except OSError as error:  # some file systems, such as Lustre mounted without flock
            raise StorageError(
                f"{self.path.parent} cannot be locked ({error.strerror}), so two processes could write to it at once. "
                "Choose a folder on another file system, or mount this one with flock."
            ) from None


@contextmanager
def translate_os_errors(path: Path) -> Iterator[None]:
    """Turn operating-system errors in this block, which writes `path`, into `StorageError`s."""
    try:
        yield
    except OSError as error:
        raise storage_error(path, error) from error


def storage_error(path: Path, error: OSError) -> StorageError:
    """Return a `StorageError` that explains an operating-system error on writing `path`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorageError(
            f"The disk is full: {path} could not be written. What was saved before is intact; "
            "free some space and run the same command again to continue."
        )
    if error.errno == errno.ELOOP:
        return StorageError(f"{path} is, or holds, a symbolic link where files are to be written. Remove the link.")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return StorageError(f"{path} cannot be written ({error.strerror}). Make it writable, or choose another folder.")
    return StorageError(f"{path} could not be written: {error.strerror or error}.")


def check_finite(path: Path, tensors: "Mapping[str, Tensor]") -> None:
    """Raise an error if weights are NaN or infinite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        low, high = tensor.aminmax()  # both are NaN if any value is; isfinite() takes 25 times as long
        if not (low.isfinite() and high.isfinite()):
            raise AidgnError(
                f"{path} cannot be used: {name} holds NaN or infinite values. The file is damaged, or the "
                "training that wrote it diverged; use another file, or train again."
            )


def write_at(file: IO[bytes], content: bytes | memoryview, position: int) -> None:
    """Write all of `content` at a position of a file."""
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, position)
        rest = rest[written:]
        position += written
