"""Spectral decoupling: keep the logits small, so that a learned feature does not starve the others of gradient."""

from torch import Tensor

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches, join
from aidgn.algorithms.search_space import log_uniform


class SD(Algorithm):
    """loss = CE over all samples + sd_reg mean of the squared logits"""

    title = "cross entropy with a penalty on the logits"
    paper = "Pezeshki et al., NeurIPS 2021"
    trains_on_features = True
    mean_over_samples = True
    search_space = {**COMMON, "sd_reg": (0.1, log_uniform(-5, -1))}

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        logits = self.predict(x)
        risk = self.cross_entropy(logits, y)
        penalty = logits.square().mean()
        return {"loss": risk + self.hparams.sd_reg * penalty, "risk": risk, "penalty": penalty}
