"""Risk extrapolation: make the risks of the domains equal."""

from torch import Tensor

from aidgn.algorithms.annealed import AnnealedPenalty
from aidgn.algorithms.base import COMMON, Minibatches, join
from aidgn.algorithms.search_space import floor_power, log_uniform


class VREx(AnnealedPenalty):
    """loss = mean_d CE_d + vrex_lambda mean_d (CE_d - mean CE)^2

    The weight is 1 in the first vrex_penalty_anneal_iters updates; then Adam starts from zero."""

    title = "equal risks in all domains, by a penalty on their variance"
    paper = "Krueger et al., ICML 2021"
    trains_on_features = True
    min_domains = 2
    anneal, strength = "vrex_penalty_anneal_iters", "vrex_lambda"
    search_space = {
        **COMMON,
        "vrex_lambda": (10.0, log_uniform(-1, 5)),
        "vrex_penalty_anneal_iters": (500, floor_power(10, 0, 4)),
    }

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, _ = join(minibatches)
        domain_risks = self.risks(self.predict(x), minibatches)
        risk = domain_risks.mean()
        penalty = domain_risks.var(correction=0)
        return {"loss": risk + self.weight * penalty, "risk": risk, "penalty": penalty}
