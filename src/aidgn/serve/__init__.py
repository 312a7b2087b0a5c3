"""A local page and a JSON endpoint that classify pictures with one model."""

import importlib.util

from aidgn.errors import AidgnError

missing = [name for name in ("starlette", "uvicorn", "prometheus_client") if importlib.util.find_spec(name) is None]
if not any(importlib.util.find_spec(name) for name in ("python_multipart", "multipart")):
    missing.append("python-multipart")
if missing:
    raise AidgnError(f"`aidgn serve` needs {' and '.join(missing)}, not installed here: pip install 'aidgn[serve]'.")

from aidgn.serve.access import Access  # noqa: E402 (the check comes first)
from aidgn.serve.app import create_app, load_app, name_model  # noqa: E402
from aidgn.serve.engine import Limits  # noqa: E402
from aidgn.serve.errors import RequestError  # noqa: E402
from aidgn.serve.neighbors import LatentSpace, build_latent_space  # noqa: E402
from aidgn.serve.server import is_loopback, listen, local_address, run_server  # noqa: E402

__all__ = [
    "Access",
    "LatentSpace",
    "Limits",
    "RequestError",
    "build_latent_space",
    "create_app",
    "is_loopback",
    "listen",
    "load_app",
    "local_address",
    "name_model",
    "run_server",
]
