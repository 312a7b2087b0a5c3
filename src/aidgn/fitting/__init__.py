"""From a folder of images to a model and the accuracy to expect on an unseen domain."""

from aidgn.fitting.estimate import Estimate
from aidgn.fitting.findings import inspect
from aidgn.fitting.plan import FitPlan
from aidgn.fitting.result import FitResult
from aidgn.fitting.workflow import fit

__all__ = ["Estimate", "FitPlan", "FitResult", "fit", "inspect"]
