"""Models on the Hugging Face Hub, named hf://user/name or hf://user/name@revision."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aidgn
from aidgn.errors import AidgnError

PREFIX = "hf://"


def is_address(path: object) -> bool:
    """Return whether a path names a model on the Hub."""
    return isinstance(path, str) and path.startswith(PREFIX)


def parse(address: str) -> tuple[str, str | None]:
    """Split hf://user/name@revision into repository and revision, which is optional.

    >>> parse("hf://user/name@v1")
    ('user/name', 'v1')
    """
    repository, _, revision = address.removeprefix(PREFIX).partition("@")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository, re.ASCII):
        prefix = PREFIX if is_address(address) else ""
        raise AidgnError(f"{address} does not name a model on the Hub; expected {prefix}user/name.")
    return repository, revision or None


def download(address: str, file: str) -> Path:
    """Return the local copy of a file of a model. The Hub's library keeps it for the next time."""
    repository, revision = parse(address)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of each attempt to reach the Hub
    try:
        with translated_errors(address, file):
            return Path(hf_hub_download(repository, file, revision=revision, library_name="aidgn"))
    finally:
        logging.set_verbosity(verbosity)


def check_login(address: str) -> None:
    """Raise an error unless the user is logged in to the Hub."""
    from huggingface_hub import HfApi

    with translated_errors(address):
        HfApi().whoami()


def upload(folder: Path, address: str, private: bool = False) -> str:
    """Upload the files of a folder to a model, which is created if needed, and return its web address.

    Args:
        folder: Folder of the files.
        address: hf://user/name or user/name.
        private: Whether a new model is visible to its owner only.
    """
    from huggingface_hub import HfApi

    repository, revision = parse(address)
    api = HfApi(library_name="aidgn")
    with translated_errors(address):
        url = api.create_repo(repository, private=private, exist_ok=True)
        message = f"Upload with aidgn {aidgn.__version__}"
        api.upload_folder(repo_id=repository, folder_path=folder, revision=revision, commit_message=message)
    return str(url)


@contextmanager
def translated_errors(address: str, file: str = "") -> Iterator[None]:
    """Turn errors of the Hub's library into sentences; their classes depend on its version."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError:
        reason = "its owner must grant access: ask for it on the model's page and log in with `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "the Hub has no such model, or it is private: log in with `hf auth login`, or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = "the model has no such revision"
    except errors.LocalEntryNotFoundError:
        reason = "the Hub cannot be reached, and there is no copy of an earlier download"
    except errors.EntryNotFoundError:
        reason = f"the model has no {file}, which `aidgn push` writes"
    except errors.LocalTokenNotFoundError:
        reason = "nobody is logged in: run `hf auth login`, or set HF_TOKEN"
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
    else:
        return
    raise AidgnError(f"{address}: {reason}.")
