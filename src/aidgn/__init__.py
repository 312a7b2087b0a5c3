"""aidgn: image classifiers that keep working on domains they have never seen."""

__version__ = "0.1.0"
