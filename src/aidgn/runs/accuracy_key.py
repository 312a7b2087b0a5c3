"""Names of accuracies in records, as DomainBed writes them: env0_in_acc, env0_out_acc.

The number is the domain's. `in` is the split that the protocol trains on, 80 % of a domain's images; `out` is the rest.
"""

import re
from typing import Literal

Split = Literal["in", "out"]
_KEY = re.compile(r"env(\d{1,3})_(in|out)_acc")


def accuracy_key(domain: int, split: Split) -> str:
    """Return the name of the accuracy on a split of a domain."""
    return f"env{domain}_{split}_acc"


def parse_accuracy_key(key: str) -> tuple[int, str] | None:
    """Return the domain and the split of an accuracy; None if the key names something else."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), match[2]) if match else None
