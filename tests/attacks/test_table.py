"""The table of attacks in the documentation has the attacks of the tests."""

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
    assert {name for name in names if not any(name == (row[3], row[0][: len(name[1])]) for row in rows)} == set()
    for attack, tried, survived, file in rows:
        assert any(attack.startswith(name) for test, name in names if test == file), attack
        assert int(tried) == int(survived) > 0
