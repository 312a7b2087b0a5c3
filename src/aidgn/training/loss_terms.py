"""The terms of the objective between two records, kept on the device: nothing is read back at a step."""

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from aidgn.algorithms import Algorithm
from aidgn.algorithms.checks import check_terms
from aidgn.errors import AidgnError
from aidgn.runs.folder import RunWriter
from aidgn.runs.records import RECORDED
from aidgn.training.errors import NotFinite


class LossTerms:
    """Sums of terms since the last record, and the first step at which one was not finite."""

    def __init__(self, owner: str, device: torch.device, steps: int):
        self.owner = owner
        self.device = device
        self.steps = steps
        self.checked = False
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.not_finite: list[str] = []  # names of terms that were not finite in the last record
        self.bad_step = torch.full((), steps + 1, device=device)  # first step with a NaN or infinity

    def add(self, terms: Mapping[str, Tensor | float], step: int) -> None:
        """Add the terms of a step. A custom `update` may return floats."""
        if not self.checked:
            check_terms(self.owner, terms, "update")
            for name in terms:
                if re.fullmatch(RECORDED, name):
                    raise AidgnError(
                        f"{self.owner} returns a term `{name}`, but records use this name already. Rename the term."
                    )
            self.checked = True
        values = {
            name: torch.as_tensor(term, dtype=torch.float32, device=self.device).detach()
            for name, term in terms.items()
        }
        for name, value in values.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value.clone()
            self.counts[name] = self.counts.get(name, 0) + 1
        finite = torch.stack(list(values.values())).isfinite().all()
        self.bad_step = torch.where(finite | (self.bad_step < step), self.bad_step, step)

    def take_means(self) -> dict[str, float]:
        """Return the means since the last record and start again."""
        means = {name: float(total) / self.counts[name] for name, total in self.sums.items()}
        self.not_finite = [name for name, mean in means.items() if not math.isfinite(mean)]
        self.sums = {}
        self.counts = {}
        return means

    def mark_bad(self, step: int) -> None:
        """Note that something other than a term was not finite at this step."""
        self.bad_step.clamp_(max=step)

    def check_finite(self, algorithm: Algorithm, step: int, folder: RunWriter) -> None:
        """Raise `NotFinite`, before anything is saved, if a term since the last record or a weight is not finite."""
        norms = torch.stack(
            [norm.float() for norm in torch._foreach_norm([parameter.detach() for parameter in algorithm.parameters()])]
        )
        bad_step = int(torch.where(norms.isfinite().all(), self.bad_step, self.bad_step.clamp(max=step)))
        if bad_step <= self.steps:
            subject = self._culprit()
            folder.log(f"{subject} was not finite at step {bad_step}")
            raise NotFinite(subject, bad_step, folder.state, algorithm.hparams.lr, folder.metadata.precision)

    def _culprit(self) -> str:
        """Name the first term that is not finite, unless the loss is not finite either."""
        names = self.not_finite or [name for name, total in self.sums.items() if not total.isfinite()]
        if names and "loss" not in names:
            return f"{names[0]}, which {self.owner} reports,"
        return "The loss, a weight or a prediction"

    def state(self) -> dict[str, Any]:
        return {"sums": self.sums, "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sums = {name: value.to(self.device) for name, value in state["sums"].items()}
        self.counts = dict(state["counts"])
