"""Empirical risk minimisation: pool all domains, minimise the mean cross entropy. The baseline to beat."""

from torch import Tensor

from aidgn.algorithms.base import Algorithm, Minibatches, join


class ERM(Algorithm):
    """loss = CE over all samples."""

    title = "pool the domains, minimise the cross entropy"
    paper = "Vapnik, IEEE Trans. Neural Networks 1999; as in Gulrajani & Lopez-Paz, ICLR 2021"
    trains_on_features = True
    mean_over_samples = True

    def objective(self, minibatches: Minibatches) -> dict[str, Tensor]:
        x, y = join(minibatches)
        return {"loss": self.cross_entropy(self.predict(x), y)}
