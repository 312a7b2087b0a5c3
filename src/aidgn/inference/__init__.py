"""Trained models in use: load, predict, export."""

from aidgn.inference.model import Model, Prediction, find_images, find_model, load_model

__all__ = ["Model", "Prediction", "find_images", "find_model", "load_model"]
