"""Many runs: the plan of them, and how they are launched."""

from collections.abc import Sequence
from typing import Any

from aidgn.errors import UserError
from aidgn.training.spec import RunSpec


def plan(datasets: Sequence[str], algorithms: Sequence[str], *, targets: Sequence[str] = (), trials: int = 3,
         draws: int = 1, data_dir: str | None = None, **shared: Any) -> list[RunSpec]:
    """Every combination, in order of priority: data set, algorithm, draw, trial, target. No target means each domain in
    turn; what is named twice counts once. `shared` goes to every run; all are checked against their data set before the
    first one starts."""
    for option, value in (("trials", trials), ("draws", draws)):
        if value < 1:
            raise UserError(f"--{option} is {value}; expected a whole number of at least 1.")
    specs = []
    for dataset in dict.fromkeys(datasets):
        loaded = RunSpec(dataset, image_size=shared.get("image_size")).load_dataset(data_dir)
        names = list(dict.fromkeys(loaded.domains[loaded.find_domain(target)] for target in targets)) or loaded.domains
        specs += [RunSpec(dataset, algorithm, name, trial, draw, **shared).resolved(loaded)
                  for algorithm in dict.fromkeys(algorithms) for draw in range(draws) for trial in range(trials)
                  for name in names]
    return specs
