"""aidgn export"""

import click


@click.command(
    epilog="""\b
Examples:
  aidgn export runs/digits-AIDGN-chalk-trial0-draw0-524de501
  aidgn export RUN --out for-the-shop/
  aidgn export RUN --no-onnx
The ONNX file takes pictures of any size, prepares them itself, and is compared with the model before it is kept.
model.safetensors is all that `aidgn predict` and `aidgn serve` need; nothing in it is code.""",
)
@click.argument("model")
@click.option("--out", metavar="DIR", help="Where to write  [default: MODEL/export].")
@click.option("--no-onnx", is_flag=True, help="Write safetensors and the card only.")
@click.option("--data", metavar="DIR", help="The images the model was trained on, if they have moved.")
@click.option("--algorithm", metavar="FILE.py:CLASS", help="Where the class is, if the algorithm is your own.")
def export(model: str, out: str | None, no_onnx: bool, data: str | None, algorithm: str | None) -> None:
    """Write MODEL, the folder of a finished run, as files for use elsewhere."""
    from aidgn.inference.export import export as write

    written = write(
        model,
        out,
        onnx=not no_onnx,
        data=data,
        algorithm=algorithm,
        on_progress=lambda what: click.echo(f"{what} ...", err=True),
    )
    for path in written.files:
        size = path.stat().st_size
        click.echo(f"{path}  {size / 1e6:.1f} MB" if size >= 1e5 else f"{path}  {size / 1e3:.1f} kB")
    if written.check:
        click.echo(f"{written.check}.")
