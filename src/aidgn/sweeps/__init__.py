"""Plan, launch and continue many runs."""
