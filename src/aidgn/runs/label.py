"""The label of an algorithm in records and tables."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Label:
    """An algorithm as one row of a table. `str(label)` is its text, such as ERM, ERM+SMA:200 or Mine@4f1c."""

    name: str  # name of the algorithm
    average: str = ""  # how its weights are averaged over steps, "sma" for example; empty for the weights as trained
    # First four digits of the digest of a custom algorithm's file, if runs of several versions are compared
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> "Label":
        """Read the text of a label, as records hold it."""
        text, _, version = text.partition("@")
        name, _, average = text.partition("+")
        return cls(name, average.lower(), version)

    def __str__(self) -> str:
        average = f"+{self.average.upper()}" if self.average else ""
        version = f"@{self.version}" if self.version else ""
        return f"{self.name}{average}{version}"
