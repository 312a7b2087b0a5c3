"""aidgn features"""

from pathlib import Path
from typing import Any

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
def features(run: str, out: str | None, **options: Any) -> None:
    """Compute the features of every image of every domain with the network of RUN, a finished run."""
    from aidgn.analysis.extraction import extract_features
    from aidgn.errors import AidgnError
    from aidgn.progress import RunDisplay
    from aidgn.runs.folder import RunFolder

    if out is not None and Path(out).suffix not in (".npz", ".parquet"):
        raise AidgnError(f"--out {out} should end in .npz or .parquet, the two formats of feature files.")
    with RunDisplay() as display:
        computed = extract_features(run, must_keep=out is None, on_progress=display.update, **options)
    path = RunFolder(run).features if out is None else computed.save(out)
    click.echo(
        f"{computed.dataset}, {computed.algorithm}, {', '.join(computed.targets) or 'no domain'} unseen, trial "
        f"{computed.trial}: {len(computed)} images of {len(computed.domain_names)} domains, "
        f"{computed.features.shape[1]} features each."
    )
    for name in computed.domain_names:
        train, validation = computed.split(name)
        seen = "unseen" if name in computed.targets else "source"
        click.echo(
            f"  {name} ({seen}): accuracy {computed.accuracy(train):.1%} on {len(train)} images of the in split, "
            f"{computed.accuracy(validation):.1%} on {len(validation)} of the out split"
        )
    click.echo(f"Features: {path}")
