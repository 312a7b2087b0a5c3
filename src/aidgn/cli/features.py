"""aidgn features"""

from pathlib import Path

import click

from aidgn.cli.options import custom_algorithm_option, data_option, device_option


@click.command(
    epilog="""\b
Examples:
  aidgn features runs/PACS-AIDGN-sketch-trial0-draw0-524de501
  aidgn features RUN --out features.parquet
RUN/features.npz keeps the features, and every analysis reads them from there.""",
)
@click.argument("run")
@click.option("--out", metavar="FILE.npz|FILE.parquet", help="Also write the features to this file.")
@data_option
@custom_algorithm_option
@device_option
def features(run: str, out: str | None, data: str | None, algorithm: str | None, device: str) -> None:
    """Compute the features of every image of every domain with the network of RUN, a finished run."""
    from aidgn.analysis.extraction import extract_features
    from aidgn.cli.display import RunDisplay
    from aidgn.errors import AidgnError
    from aidgn.runs.folder import RunFolder

    if out is not None and Path(out).suffix not in (".npz", ".parquet"):
        raise AidgnError(f"--out {out} should end in .npz or .parquet, the two forms that features are written in.")
    with RunDisplay() as display:
        found = extract_features(
            run, data=data, device=device, algorithm=algorithm, must_keep=out is None, on_progress=display.update
        )
    path = RunFolder(run).features if out is None else found.save(out)
    click.echo(
        f"{found.dataset}, {found.algorithm}, {', '.join(found.targets) or 'no domain'} unseen, trial "
        f"{found.trial}: {len(found)} images of {len(found.domain_names)} domains, "
        f"{found.features.shape[1]} features each."
    )
    for name in found.domain_names:
        inside, outside = found.split(name)
        seen = "unseen" if name in found.targets else "source"
        click.echo(
            f"  {name} ({seen}): accuracy {found.accuracy(inside):.1%} on {len(inside)} images of the in split, "
            f"{found.accuracy(outside):.1%} on {len(outside)} of the out split"
        )
    click.echo(f"Features: {path}")
