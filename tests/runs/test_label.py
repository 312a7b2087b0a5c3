"""Labels of algorithms are read from records, compared by their parts and written as before."""

import pytest

from aidgn.runs.label import Label


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("ERM", Label("ERM")),
        ("AIDGN-noR+SWAD", Label("AIDGN-noR", "swad")),
        ("ERM+SMA:200", Label("ERM", "sma:200")),
        ("Mine@4f1c", Label("Mine", version="4f1c")),
        ("Mine+SMA@4f1c", Label("Mine", "sma", "4f1c")),
    ],
)
def test_text_and_label(text: str, label: Label) -> None:
    assert Label.parse(text) == label and str(label) == text
