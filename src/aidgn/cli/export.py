"""aidgn export"""

from typing import Any

import click

from aidgn.cli.options import custom_algorithm_option, moved_data_option
from aidgn.errors import AidgnError


@click.command(
    epilog="""\b
Examples:
  aidgn export runs/digits-AIDGN-chalk-trial0-draw0-524de501
  aidgn export RUN --out for-the-shop/
  aidgn export RUN --no-onnx
  aidgn export RUN1 RUN2 RUN3 --out mean/
The ONNX model takes pictures of any size and includes the preprocessing; its outputs are compared with the original
model's. `aidgn predict` and `aidgn serve` need only model.safetensors, which contains no code.""",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--out", metavar="DIR", help="Folder to write to  [default: MODEL/export; several models need it].")
@click.option("--no-onnx", is_flag=True, help="Write only model.safetensors and the model card.")
@moved_data_option
@custom_algorithm_option
def export(models: tuple[str, ...], out: str | None, no_onnx: bool, **options: Any) -> None:
    """Write MODEL, the folder of a finished run, as ONNX, safetensors and a model card.

    Several models become one ONNX file with the mean of their probabilities."""
    from aidgn.inference.export import export as write
    from aidgn.inference.export import export_ensemble

    options["on_progress"] = lambda step: click.echo(f"{step} ...", err=True)
    if len(models) > 1:
        if no_onnx or out is None:
            problem = "--no-onnx leaves nothing to write" if no_onnx else "give a folder with --out"
            raise AidgnError(f"Several models are written as one ONNX file: {problem}.")
        written = export_ensemble(models, out, **options)
    else:
        written = write(models[0], out, onnx=not no_onnx, **options)
    for path in written.files:
        size = path.stat().st_size
        click.echo(f"{path}  {size / 1e6:.1f} MB" if size >= 1e5 else f"{path}  {size / 1e3:.1f} kB")
    if written.check:
        click.echo(f"{written.check}.")
