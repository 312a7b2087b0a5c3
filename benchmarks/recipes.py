"""Choose recipes (rate, schedule, kappa, averaging, warm start) by the labels of the source domains alone.

    python benchmarks/recipes.py train recipes.yaml --out runs/recipes --data data --workers 5
    python benchmarks/recipes.py choose runs/recipes --confirm chosen.yaml --weights resnet50.safetensors
    python benchmarks/recipes.py train chosen.yaml --singles --out runs/chosen --data data --workers 5

recipes.yaml is a plan, or a list of plans, as `aidgn sweep --plan` reads them. The default and every value of a list of
hyper-parameters are a configuration each:

    - {datasets: PACS, algorithms: [ERM], trials: 1, steps: 3000, eval_every: 150, weights: resnet50.safetensors,
       schedule: cosine, hyper_parameters: {lr: [5.0e-5, 1.0e-4]}}

`train` trains every configuration with each pair of domains unseen, six runs on PACS, several at a time, and measures
the running average of the weights (sma) of every run without a second training. The same command continues interrupted
runs. On one GPU, several processes need NVIDIA's MPS to run at the same time: `nvidia-cuda-mps-control -d`.

`choose` scores a configuration for the unseen domain t by the mean, over the other domains s, of its accuracy on s in
the run that saw neither s nor t. So the labels of t choose nothing. `--confirm` writes the plan that trains each choice
with its t unseen, in several trials; `train --singles` trains runs with one unseen domain. Give every algorithm the
same number of configurations: the best of more is better by chance alone. `choose` marks unequal numbers.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

sys.path.insert(0, str(Path(__file__).parent))
from averaging import measure_averages

from aidgn.data.cache import prepare
from aidgn.data.registry import is_registered
from aidgn.progress import RunDisplay, SweepDisplay
from aidgn.runs.accuracy_key import accuracy_key
from aidgn.runs.options import run_options
from aidgn.runs.reader import read_runs
from aidgn.runs.records import RunRecords, domain_names
from aidgn.runs.spec import RunSpec
from aidgn.sweeps.launchers.local import LocalLauncher
from aidgn.sweeps.plan_file import read_plans

if __name__ == "__mp_main__":  # a worker process imports this file before it trains
    measure_averages()

OPTIONS = tuple(option.name for option in run_options())
STEPS = ("selected", "last", "second-half")


def train(plan: Path, out: Path, data: Path | None, workers: int, device: str, singles: bool) -> int:
    """Train the runs of a plan; return the number of runs that failed."""
    specs = list({spec.key(): spec for spec in expand(plan, data, singles)}.values())
    with RunDisplay() as display:
        for name in dict.fromkeys(spec.dataset for spec in specs):
            dataset = next(spec for spec in specs if spec.dataset == name).load_dataset(data)
            prepare(dataset, on_progress=lambda done, total: display.update("decoding images", done, total))
    with SweepDisplay(specs) as shown:
        failed = LocalLauncher(workers).run(specs, out, device=device, data_dir=data, on_event=shown.update)
    for number, error in failed.items():
        print(f"{specs[number].key()} failed: {error.strip().splitlines()[-1]}", file=sys.stderr)
    return len(failed)


def expand(plan: Path, data: Path | None, singles: bool) -> list[RunSpec]:
    """Return the runs of a plan with a pair of unseen domains, or with one, configuration by configuration."""
    entries = [replace(entry, leave_one_out=not singles) for entry in read_plans(plan)[0]]
    specs = [spec for entry in entries for spec in entry.expand(lambda spec: spec.load_dataset(data))]
    return [spec for spec in specs if len(spec.target) == (1 if singles else 2)]


# The choice -----------------------------------------------------------------------------------------------------------


@dataclass
class Configuration:
    """Runs of one algorithm that differ in unseen domains and trial.

    Args:
        settings: What they share: options, hyper-parameters, label.
        root: Where their images were.
        accuracies: Accuracies on domain s, one per trial, by (t, s), the unseen domains of their runs.
    """

    settings: Mapping[str, Any]
    root: str | None = None
    accuracies: dict[tuple[int, int], list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def family(self) -> str:
        """The algorithm, averaged or not."""
        return str(self.settings["algorithm"]).split("+")[0]

    def score(self, target: int, domains: int) -> float:
        """Return the mean accuracy on the other domains, each unseen with the target; NaN if a run lacks."""
        pairs = [(target, other) for other in range(domains) if other != target]
        return mean(mean(self.accuracies.get(pair) or [float("nan")]) for pair in pairs)


def configurations(runs: Iterable[RunRecords], step: str) -> list[Configuration]:
    """Group finished runs with two unseen domains."""
    found: dict[str, Configuration] = {}
    for run in runs:
        if len(run.targets) != 2 or not run.finished:
            continue
        settings = {name: value for name, value in run.settings.items() if name not in ("trial", "data", "precision")}
        configuration = found.setdefault(repr(sorted(settings.items())), Configuration(settings, run.metadata.root))
        first, second = run.targets
        configuration.accuracies[first, second].append(accuracy(run, second, step))
        configuration.accuracies[second, first].append(accuracy(run, first, step))
    return list(found.values())


def accuracy(run: RunRecords, domain: int, step: str) -> float:
    """Return the accuracy on an unseen domain at a step chosen without it, or the mean over the second half."""
    key = accuracy_key(domain, "in")
    if step == "selected":
        return float(run.column(key)[run.select()[1]])
    curve = run.curve(key)
    return float(curve[-1] if step == "last" else np.mean(curve[len(curve) // 2 :]))


def describe(configuration: Configuration, members: Sequence[Configuration]) -> str:
    """Name a configuration by the settings in which it differs from others of its algorithm."""
    flat = [{**each.settings, **each.settings["hyper_parameters"]} for each in members]
    mine = {**configuration.settings, **configuration.settings["hyper_parameters"]}
    skipped = ("algorithm", "average", "hyper_parameters")
    words = [
        f"{name} {mine.get(name)}"
        for name in dict.fromkeys(name for each in flat for name in each)
        if name not in skipped and mine.get(name) and len({repr(each.get(name)) for each in flat}) > 1
    ]
    return f"{configuration.settings['algorithm']}: {', '.join(words) or 'defaults'}"


def choose(folders: Sequence[Path], step: str, confirm: Path | None, weights: str | None, trials: int) -> None:
    """Print the scores of all configurations and the choices; write the plan that trains the choices."""
    runs = read_runs(*folders).runs
    if confirm and not weights and (files := {run.settings.get("weights") for run in runs} - {None, "hub", "none"}):
        sys.exit(f"The runs started from {', '.join(sorted(files))}: give that file with --weights.")
    plans = []
    for dataset, members_by_family in group(configurations(runs, step)).items():
        names = domain_names(next(run.args for run in runs if run.args["dataset"] == dataset))
        print(f"{dataset}: accuracy (%) on other unseen domains, by the target whose labels play no part; step: {step}")
        print(f"| | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
        complete: dict[str, int] = {}
        for family, members in members_by_family.items():
            scores = np.array(
                [[member.score(target, len(names)) for target in range(len(names))] for member in members]
            )
            chosen = np.nan_to_num(scores).argmax(0)
            for number in np.argsort(-np.nan_to_num(scores).mean(1), kind="stable"):
                cells = [cell(score, number == best) for score, best in zip(scores[number], chosen, strict=True)]
                print(f"| {describe(members[number], members)} | {' | '.join(cells)} |")
            complete[family] = int((~np.isnan(scores)).all(1).sum())
            print(f"| *{family}: {complete[family]} of {len(members)} configurations complete* |{' |' * len(names)}")
            for number, member in enumerate(members):
                targets = [name for name, best in zip(names, chosen, strict=True) if number == best]
                if targets and complete[family]:
                    plans.append(confirming_plan(member, targets, weights, trials))
        if len(set(complete.values())) > 1:
            counts = ", ".join(f"{family} {count}" for family, count in complete.items())
            print(
                f"**Unequal budgets**: the choices are from {counts} configurations, which favours the larger number."
            )
    if confirm:
        confirm.write_text(yaml.safe_dump(plans, sort_keys=False, default_flow_style=None, width=110))
        print(f"{confirm}: {len(plans)} plans that train the choices in {trials} trials.")


def group(found: Iterable[Configuration]) -> dict[str, dict[str, list[Configuration]]]:
    """Group configurations by data set and algorithm."""
    groups: dict[str, dict[str, list[Configuration]]] = {}
    for configuration in found:
        families = groups.setdefault(configuration.settings["dataset"], {})
        families.setdefault(configuration.family, []).append(configuration)
    return groups


def cell(score: float, is_best: bool) -> str:
    """Write a score in percent; the best of its algorithm in bold."""
    if np.isnan(score):
        return "X"
    return f"**{100 * score:.1f}**" if is_best else f"{100 * score:.1f}"


def confirming_plan(
    configuration: Configuration, targets: Sequence[str], weights: str | None, trials: int
) -> dict[str, Any]:
    """Return the plan that trains a configuration with each of these domains unseen."""
    settings = {name: configuration.settings[name] for name in OPTIONS if configuration.settings.get(name)}
    if weights:
        settings["weights"] = weights  # run.json has the name of the file and its digest
    dataset = configuration.settings["dataset"]
    if not is_registered(dataset) and configuration.root:
        dataset = configuration.root
    return {
        "datasets": [dataset],
        "algorithms": [configuration.family],
        "targets": list(targets),
        "trials": trials,
        **settings,
        "hyper_parameters": dict(configuration.settings["hyper_parameters"]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train every configuration of a plan with each pair unseen")
    training.add_argument("plan", type=Path)
    training.add_argument("--out", type=Path, default=Path("runs"))
    training.add_argument("--data", type=Path, help="folder of the data sets")
    training.add_argument("--workers", type=int, default=1, help="runs at a time")
    training.add_argument("--device", default="auto")
    training.add_argument("--singles", action="store_true", help="leave out one domain instead of each pair")
    choosing = commands.add_parser("choose", help="print the scores and the choice for each target")
    choosing.add_argument("folders", type=Path, nargs="+")
    choosing.add_argument("--step", choices=STEPS, default=STEPS[0], help="the step of a run that counts")
    choosing.add_argument("--confirm", type=Path, metavar="PLAN.yaml", help="write the plan that trains the choices")
    choosing.add_argument("--weights", help="initial weights for that plan")
    choosing.add_argument("--trials", type=int, default=3, help="trials of that plan")
    given = vars(parser.parse_args())
    sys.exit(bool({"train": train, "choose": choose}[given.pop("command")](**given)))
