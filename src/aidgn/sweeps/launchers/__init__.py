"""Where the runs of a sweep are trained: this machine, Ray, SLURM."""
