"""ERM whose rate falls as EQRM's does: is it EQRM's objective that helps, or its rate?"""

from torch import Tensor

from aidgn.algorithms import Minibatches
from aidgn.algorithms.eqrm import EQRM


class FallingERM(EQRM):
    """loss = mean_d CE_d. After eqrm_burnin_iters updates Adam starts again from zero with rate eqrm_lr."""

    title = "ERM, with the rate of EQRM"

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        logits = self.forward_per_domain(self.predict, [x for x, _ in minibatches])
        return {"loss": self.risks(logits, minibatches).mean()}
