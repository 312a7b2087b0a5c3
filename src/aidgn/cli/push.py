"""aidgn push"""

from typing import Any

import click

from aidgn.cli.options import custom_algorithm_option, moved_data_option


@click.command(
    epilog="""\b
Examples:
  aidgn push runs/fit-photos/model user/photos
  aidgn push RUN user/photos --private --no-onnx
  aidgn predict hf://user/photos new/
Log in first with `hf auth login`, or set HF_TOKEN. Commands that take a model take hf://user/photos, or
hf://user/photos@REVISION for a branch, tag or commit.""",
)
@click.argument("model")
@click.argument("repository", metavar="USER/NAME")
@click.option("--private", is_flag=True, help="Make a new model visible to its owner only.")
@click.option("--no-onnx", is_flag=True, help="Upload only model.safetensors and the model card.")
@moved_data_option
@custom_algorithm_option
def push(model: str, repository: str, no_onnx: bool, **options: Any) -> None:
    """Upload MODEL, the folder of a finished run, to the Hugging Face Hub.

    The files are model.safetensors, model.onnx and a model card with the accuracy on every unseen domain."""
    from aidgn.inference.export import push as upload

    options["on_progress"] = lambda step: click.echo(f"{step} ...", err=True)
    click.echo(upload(model, repository, onnx=not no_onnx, **options))
