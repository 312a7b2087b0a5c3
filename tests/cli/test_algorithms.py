"""What `aidgn algorithms` says of the default schedule."""

from click.testing import CliRunner

from aidgn.cli import app


def show(name: str) -> str:
    result = CliRunner().invoke(app, ["algorithms", name])
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_the_halving_of_the_paper_is_told() -> None:
    for name in ("AIDGN", "AIDGN-release"):
        assert "halved at steps 2,000 and 4,000 on PACS and OfficeHome" in show(name)
    assert "halved" not in show("ERM")
