"""Names of accuracies in records, as DomainBed writes them: env0_in_acc, env0_out_acc; and of other metrics.

The number is the domain's. `in` is the split that the protocol trains on, 80 % of a domain's images; `out` is the rest.
"""

import re
from functools import cache
from typing import Literal

from aidgn.metrics import METRICS

Split = Literal["in", "out"]
_KEY = re.compile(rf"env(\d{{1,3}})_(in|out)_({'|'.join(metric.key for metric in METRICS.values())})")
_BY_KEY = {metric.key: name for name, metric in METRICS.items()}


def accuracy_key(domain: int, split: Split) -> str:
    """Return the name of the accuracy on a split of a domain."""
    return f"env{domain}_{split}_acc"


def metric_key(domain: int, split: Split, metric: str) -> str:
    """Return the name of a metric, a key of `METRICS`, on a split of a domain."""
    return f"env{domain}_{split}_{METRICS[metric].key}"


def class_accuracies_key(domain: int, split: Split) -> str:
    """Return the name of the list of accuracies on the images of each class of a split of a domain."""
    return f"env{domain}_{split}_class_accuracy"


def parse_accuracy_key(key: str) -> tuple[int, str] | None:
    """Return the domain and the split of an accuracy; None if the key names something else."""
    parsed = parse_metric_key(key)
    return parsed[:2] if parsed and parsed[2] == "accuracy" else None


@cache
def parse_metric_key(key: str) -> tuple[int, str, str] | None:
    """Return the domain, the split and the metric, a key of `METRICS`; None if the key names something else."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), match[2], _BY_KEY[match[3]]) if match else None
