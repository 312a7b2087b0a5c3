"""aidgn export"""

import click

from aidgn.cli.options import custom_algorithm_option, moved_data_option


@click.command(
    epilog="""\b
Examples:
  aidgn export runs/digits-AIDGN-chalk-trial0-draw0-524de501
  aidgn export RUN --out for-the-shop/
  aidgn export RUN --no-onnx
The ONNX model takes pictures of any size and includes the preprocessing; its outputs are compared with the original
model's. `aidgn predict` and `aidgn serve` need only model.safetensors, which contains no code.""",
)
@click.argument("model")
@click.option("--out", metavar="DIR", help="Folder to write to  [default: MODEL/export].")
@click.option("--no-onnx", is_flag=True, help="Write only model.safetensors and the model card.")
@moved_data_option
@custom_algorithm_option
def export(model: str, out: str | None, no_onnx: bool, data: str | None, algorithm: str | None) -> None:
    """Write MODEL, the folder of a finished run, as ONNX, safetensors and a model card."""
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
