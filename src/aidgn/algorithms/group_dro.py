"""Group distributionally robust optimisation: weigh the domains by how badly they do."""

import torch
from torch import Tensor

from aidgn.algorithms.base import COMMON, Algorithm, Minibatches
from aidgn.algorithms.search_space import log_uniform


class GroupDRO(Algorithm):
    """loss = sum_d q_d CE_d

    q_d starts at 1; in every update, before the loss, q_d <- q_d exp(groupdro_eta CE_d), then q <- q / sum q."""

    title = "weigh the domains by their risk, the worst the most"
    paper = "Sagawa et al., ICLR 2020"
    trains_on_features = True
    search_space = {**COMMON, "groupdro_eta": (0.01, log_uniform(-3, -1))}
    q: Tensor

    def build(self) -> None:
        self.register_buffer("q", torch.ones(self.num_domains))

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        domain_risks = self.risks(self.forward_per_domain(self.predict, [x for x, _ in minibatches]), minibatches)
        with torch.no_grad():
            self.q *= (self.hparams.groupdro_eta * domain_risks).exp()
            self.q /= self.q.sum()
        return {"loss": (self.q * domain_risks).sum(), "worst_risk": domain_risks.max()}
