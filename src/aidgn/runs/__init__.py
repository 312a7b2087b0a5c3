"""The runs on disk: what a run is, the files of its folder, its records."""
