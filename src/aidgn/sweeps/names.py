"""The names of the files in the folder of a sweep. Other packages use `SweepFolder`."""

PLAN_YAML = "sweep.yaml"
STATE = ".sweep"  # folder of the following files
PLAN_JSON = f"{STATE}/plan.json"
ATTEMPTS = f"{STATE}/attempts"  # folder of journals
SLURM = f"{STATE}/slurm"  # folder of job arrays
LOCK = f"{STATE}/lock"
AT_WORK = f"{STATE}/at-work"
