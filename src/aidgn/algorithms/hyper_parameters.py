"""The name of `search_space` in 0.1.0, for algorithms that users wrote then."""

from aidgn.algorithms.search_space import *  # noqa: F403
