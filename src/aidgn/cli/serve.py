"""aidgn serve"""

import importlib.util
import ipaddress
import logging
import signal
import socket
from pathlib import Path
from types import FrameType

import click

from aidgn.errors import AidgnError


@click.command(
    short_help="A local page and JSON endpoint for a model.",
    epilog="""\b
Examples:
  aidgn serve runs/digits-AIDGN-chalk-trial0-draw0-524de501
  aidgn serve model.safetensors --data photos/ --port 9000
  curl -F images=@photo.jpg -F images=@other.png http://127.0.0.1:8000/api/predict
\b
The endpoint POST /api/predict takes multipart/form-data with files `images` and answers
  {"images": [{"name", "label", "probability", "probabilities": {CLASS: P, ...}, "warning": TEXT or null,
               "position": [X, Y] or null, "nearest": [{"class", "domain", "distance", "thumbnail", ...}]},
              {"name", "error": {"status", "message"}}, ...], "seconds"}
Errors are {"error": {"status", "message"}} with status 403, 408, 413, 415, 422, 429 or 503. GET /api/schema gives all
of this as OpenAPI, GET /api/health says how busy the server is.""",
)
@click.argument("model")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="Address to listen on; any but a loopback one opens the server to others.",
)
@click.option(
    "--port",
    default=8000,
    show_default=True,
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port; 0 takes a free one.",
)
@click.option("--data", metavar="DIR", help="The images the model was trained on, if they have moved.")
@click.option(
    "--map",
    "count",
    default=500,
    show_default=True,
    type=click.IntRange(0, 5000),
    metavar="N",
    help="Training images on the map; 0: no map.",
)
@click.option(
    "--max-megabytes",
    default=32,
    show_default=True,
    type=click.IntRange(1, 1000),
    metavar="N",
    help="Size of a request.",
)
@click.option(
    "--max-images",
    default=16,
    show_default=True,
    type=click.IntRange(1, 256),
    metavar="N",
    help="Pictures in a request.",
)
@click.option(
    "--max-megapixels",
    default=64,
    show_default=True,
    type=click.IntRange(1, 170),
    metavar="N",
    help="Pixels of a picture, in millions; with transparency or 16-bit grey a quarter of that.",
)
@click.option(
    "--max-seconds",
    default=30,
    show_default=True,
    type=click.IntRange(1, 3600),
    metavar="N",
    help="Time for a request.",
)
@click.option(
    "--max-requests",
    default=8,
    show_default=True,
    type=click.IntRange(1, 256),
    metavar="N",
    help="Requests in work at a time; 64 more may wait.",
)
@click.option("--algorithm", metavar="FILE.py:CLASS", help="Where the class is, if the algorithm is your own.")
@click.option("--device", default="auto", show_default=True, help="cuda, cuda:1, cpu.")
def serve(
    model: str,
    host: str,
    port: int,
    data: str | None,
    count: int,
    max_megabytes: int,
    max_images: int,
    max_megapixels: int,
    max_seconds: int,
    max_requests: int,
    algorithm: str | None,
    device: str,
) -> None:
    """Serve MODEL, the folder of a finished run or an exported .safetensors file: drop pictures on the page, see their
    labels, probabilities and warnings, where they lie among the training images, and which of these are nearest."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if not any(importlib.util.find_spec(name) for name in ("python_multipart", "multipart")):
        missing.append("python-multipart")
    if missing:
        raise AidgnError(
            f"`aidgn serve` needs {' and '.join(missing)}, not installed here: pip install 'aidgn[serve]'."
        )
    listening = listen(host, port)
    try:
        run(
            listening,
            model,
            host,
            data,
            count,
            algorithm,
            device,
            {
                "megabytes": max_megabytes,
                "images": max_images,
                "megapixels": max_megapixels,
                "seconds": max_seconds,
                "requests": max_requests,
            },
        )
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
    finally:
        listening.close()


def name_of(path: Path) -> str:
    """What the page calls a model: the name of its folder or file, unless that is one which all models have."""
    from aidgn.runs.folder import RunFolder

    path = path.resolve()
    while path.name in ("model", RunFolder(path).model.name, RunFolder(path).export.name):
        path = path.parent
    return path.name.removesuffix(".safetensors")


def run(
    listening: socket.socket,
    model: str,
    host: str,
    data: str | None,
    count: int,
    algorithm: str | None,
    device: str,
    limits: dict[str, int],
) -> None:
    import uvicorn

    from aidgn.cli.display import RunDisplay
    from aidgn.inference.model import find_model, load_model
    from aidgn.serve.app import create_app
    from aidgn.serve.engine import Limits
    from aidgn.serve.neighbors import latent_space

    path = find_model(model)
    loaded = load_model(path, device, algorithm)
    space, note = None, None
    if count:
        try:
            with RunDisplay() as display:
                space = latent_space(path, loaded, count, data, display.update)
        except AidgnError as error:
            if data is not None:
                raise
            note = "they are not at hand; the server's terminal says why."  # which may name folders of this machine
            click.echo(f"No map of training images: {error}", err=True)
    name = name_of(path)
    app = create_app(loaded, space, Limits(**limits), name=name, host=host, note=note)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not self.should_exit:  # a second Ctrl-C would keep it from cleaning up, which takes seconds at most
                super().handle_exit(sig, frame)

    server = Server(
        uvicorn.Config(
            app,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            limit_concurrency=256,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=3,
        )
    )
    closed = getattr(signal, "SIGHUP", None)  # the terminal was, without Ctrl-C; `nohup` has it ignored
    if closed is not None and signal.getsignal(closed) is signal.SIG_DFL:
        signal.signal(closed, server.handle_exit)
    shown = "localhost" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    click.echo(f"Serving {name} at http://{shown}:{listening.getsockname()[1]}/   (Ctrl-C stops)", err=True)
    if not is_loopback(host):
        click.echo(
            f"Warning: {host} can be reached by other machines. There is no password and no encryption: whoever "
            "reaches this port can use the model and see small pictures of training images.",
            err=True,
        )
    server.run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, before anything slow happens."""
    try:
        [family, kind, *_, address], *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = socket.socket(family, kind)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        raise AidgnError(
            f"Port {port} of {host} cannot be used: {error.strerror}. Choose another with --port or "
            "--host; --port 0 takes a free one."
        ) from None
    return found


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
