"""Print accuracies on the unseen domain averaged over evaluations, and at the step that validation chooses.

The Markdown table shows how much a result depends on the step at which it was read.

    python benchmarks/steps.py docs/results/pacs-resnet50-he2015.zip docs/results/pacs-repeated.zip

Each folder or zip archive is read separately, so that repetitions of a run in another archive count as separate runs.
The columns are unseen domains: the mean over runs of their average over evaluations. "Chosen" is the mean over runs of
the accuracy at the step that training-domain validation chooses. The last two columns are standard deviations over all
unseen domains: how far one evaluation lies from the average of its run, and how far the averages of runs of the same
unseen domain lie apart.
"""

import argparse
from collections import defaultdict

import numpy as np

from aidgn.runs.reader import read_runs
from aidgn.runs.records import domain_names
from aidgn.selection import choose


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--after", type=int, default=2000, help="evaluations after this step count (default: 2000)")
    options = parser.parse_args()
    # Of every algorithm and target, for each run: average, variance around it, and the chosen step's accuracy.
    found: dict[str, dict[int, list[tuple[float, float, float]]]] = defaultdict(lambda: defaultdict(list))
    names: list[str] = []
    for folder in options.folders:
        for run in read_runs(folder).runs:
            if len(run.targets) != 1 or not run.finished:
                continue
            target, names = run.targets[0], domain_names(run.args)
            curve = run.curve(f"env{target}_in_acc") * 100
            late = curve[run.curve("step") > options.after]
            best = choose(target, [run])
            assert best is not None, run
            chosen = run.number(run.record(best.record), f"env{target}_in_acc") * 100
            found[run.args["algorithm"]][target].append((late.mean(), late.var(ddof=1), chosen))
    print("| Algorithm | Runs |", " | ".join([*names, "Avg", "Chosen", "Steps", "Runs apart"]), "|")
    print("|:--|" + "--:|" * (len(names) + 5))
    for algorithm, targets in sorted(found.items(), key=lambda row: -len(row[1])):
        columns = [
            np.array(targets[target]) if target in targets else np.full((1, 3), np.nan) for target in range(len(names))
        ]
        averages = [runs[:, 0].mean() for runs in columns]
        steps = np.sqrt(np.mean([runs[:, 1].mean() for runs in columns]))
        between = [runs[:, 0].var(ddof=1) for runs in columns if len(runs) > 1]
        cells = [
            *averages,
            np.mean(averages),
            np.mean([runs[:, 2].mean() for runs in columns]),
            steps,
            np.sqrt(np.mean(between)) if between else np.nan,
        ]
        print(
            f"| {algorithm} | {sum(map(len, targets.values()))} |",
            " | ".join("X" if np.isnan(cell) else f"{cell:.1f}" for cell in cells),
            "|",
        )


if __name__ == "__main__":
    main()
