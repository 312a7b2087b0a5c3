"""aidgn serve"""

import secrets
from collections.abc import Callable

import click

from aidgn.cli.options import Command, custom_algorithm_option, device_option, moved_data_option


def number_option(
    name: str, default: int, least: int, most: int, description: str, *parameter: str
) -> Callable[[Command], Command]:
    """Return an option for a whole number within bounds."""
    bounds = click.IntRange(least, most)
    return click.option(name, *parameter, default=default, type=bounds, metavar="N", help=description)


@click.command(
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
Errors are {"error": {"status", "message"}} with status 401, 403, 408, 413, 415, 422, 429 or 503.
GET /api/schema gives all of this as OpenAPI, GET /api/health reports how busy the server is, GET /metrics has numbers
for Prometheus. If there is a token, send the header Authorization: Bearer TOKEN; /api/health does not need it.""",
)
@click.argument("model")
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on; 0.0.0.0 lets phones and other machines in.",
)
@number_option("--port", 8000, 0, 65535, "Port to listen on; 0 chooses a free port.")
@click.option(
    "--token",
    envvar="AIDGN_TOKEN",
    show_envvar=True,
    metavar="TEXT",
    help="Ask for this secret  [default: none at a loopback address, else a random one, which is printed].",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Name under which a proxy offers the server, such as www.example.org; repeatable.",
)
@click.option(
    "--root-path",
    default="",
    show_default=False,
    metavar="PATH",
    help="Path under which a proxy offers the server, such as /aidgn.",
)
@click.option(
    "--trust-proxy",
    "proxies",
    multiple=True,
    metavar="ADDRESS",
    help="Address or network of a proxy whose X-Forwarded-For and X-Forwarded-Proto count; repeatable.",
)
@moved_data_option
@number_option("--map", 500, 0, 5000, "Show N training images on the map; 0 shows no map.", "map_images")
@number_option("--max-megabytes", 32, 1, 1000, "Largest size of a request.")
@number_option("--max-images", 16, 1, 256, "Most pictures in a request.")
@number_option(
    "--max-megapixels",
    64,
    1,
    170,
    "Largest picture in millions of pixels; a quarter of that with transparency or 16-bit grey.",
)
@number_option("--max-seconds", 30, 1, 3600, "Longest time for a request.")
@number_option("--max-requests", 8, 1, 256, "Most requests at a time; 64 more may wait.")
@custom_algorithm_option
@device_option
def serve(
    model: str,
    host: str,
    port: int,
    token: str | None,
    hosts: tuple[str, ...],
    root_path: str,
    proxies: tuple[str, ...],
    data: str | None,
    map_images: int,
    max_megabytes: int,
    max_images: int,
    max_megapixels: int,
    max_seconds: int,
    max_requests: int,
    algorithm: str | None,
    device: str,
) -> None:
    """Serve MODEL as a local page and JSON endpoint: the folder of a run, an exported file, or hf://user/name.

    Drop pictures on the page to see their labels, probabilities and warnings, their positions among the training
    images, and the nearest training images."""
    from aidgn.progress import RunDisplay
    from aidgn.serve import Access, Limits, is_loopback, listen, load_app, local_address, name_model, run_server

    secret = ""  # only a random token is printed: a chosen one must not appear in logs
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
        secret = f"?token={token}"
    everywhere = host in ("0.0.0.0", "::")
    access = Access(hosts if everywhere else (*hosts, host), root_path, proxies, token)
    bound = listen(host, port)  # before anything slow happens
    try:
        warnings: list[str] = []
        with RunDisplay() as display:
            app = load_app(
                model,
                access=access,
                data=data,
                map_images=map_images,
                algorithm=algorithm,
                device=device,
                limits=Limits(max_megabytes, max_images, max_seconds, max_requests, megapixels=max_megapixels),
                on_progress=display.update,
                on_warning=warnings.append,
            )

        def address(name: str) -> str:
            name = f"[{name}]" if ":" in name else name
            return f"http://{name}:{bound.getsockname()[1]}{root_path}/{secret}"

        shown = "localhost" if everywhere else host
        lines = [*warnings, f"Serving {name_model(model)} at {address(shown)}   (Ctrl-C stops)"]
        if everywhere:
            lines.append(f"On a phone or another machine of this network: {address(local_address())}")
        if not is_loopback(host):
            lines.append("The connection is not encrypted: whoever can listen to it sees pictures and token.")
        click.echo("\n".join(lines), err=True)
        run_server(app, bound, proxies)
        click.echo("Stopped.", err=True)
    except KeyboardInterrupt:
        click.echo("Stopped.", err=True)
    finally:
        bound.close()
