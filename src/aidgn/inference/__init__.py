"""Use trained models: load, predict, export."""

from aidgn.data.folders import find_images
from aidgn.inference.ensemble import Ensemble
from aidgn.inference.loading import find_model, load_model
from aidgn.inference.model import Model
from aidgn.inference.prediction import Prediction

__all__ = ["Ensemble", "Model", "Prediction", "find_images", "find_model", "load_model"]
