"""Analyse trained runs: features, predictions, doubtful labels, the paper's two assumptions, comparisons."""
