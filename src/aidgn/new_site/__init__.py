"""What to expect of a model at a site it never saw: accuracy with an interval, calibration, trust, the site alarm."""
