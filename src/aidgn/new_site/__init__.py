"""What to expect of a model at a site it never saw: accuracy with an interval, calibration, trust, the site alarm."""

from aidgn.new_site.confidence import Confidence
from aidgn.new_site.expectations import Expectations, measure
from aidgn.new_site.interval import Interval, SiteAccuracies
from aidgn.new_site.outputs import Outputs, UnseenSite
from aidgn.new_site.shift import SiteComparison, SiteReference

__all__ = [
    "Confidence",
    "Expectations",
    "Interval",
    "Outputs",
    "SiteAccuracies",
    "SiteComparison",
    "SiteReference",
    "UnseenSite",
    "measure",
]
