"""Each row of the documented table of attacks is made by a test."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_documented_attacks_are_those_of_the_tests() -> None:
    names = {
        (str(file.relative_to(ROOT)), name)
        for file in ROOT.glob("tests/*/**/test_*.py")
        for name in re.findall(r'tally\(f?"([^"{]+)', file.read_text())
    }
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \| `([^`]+)` \|$", page, re.MULTILINE)
    assert len(rows) > 30
    for attack, tried, survived, file in rows:
        assert any(attack.startswith(name) for test, name in names if test == file), attack
        assert int(tried) == int(survived) > 0
