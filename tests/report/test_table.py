"""Tables against the rules of DomainBed's printed ones, written out naively, and against numbers worked out by hand."""

import csv
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aidgn.errors import AidgnError, UnknownNameError
from aidgn.report.export import all_records_csv, write_rows
from aidgn.report.table import tables
from aidgn.report.table_formats import FORMATS, Cell, Row, Table
from aidgn.runs.differences import differences
from aidgn.runs.metadata import RunMetadata
from aidgn.runs.reader import read_runs
from aidgn.runs.records import as_records
from aidgn.selection import select

Record = dict[str, Any]
PAPER = json.loads((Path(sys.modules["aidgn.report.table"].__file__ or "").parent / "paper.json").read_text())


def record(
    dataset: str,
    algorithm: str,
    target: int,
    trial: int,
    accuracy: float,
    draw: int = 0,
    count: int = 4,
    step: int = 0,
    **args: Any,
) -> Record:
    """A record whose validation accuracy is that of every other: what is selected is `accuracy`."""
    return {
        "args": {
            "dataset": dataset,
            "algorithm": algorithm,
            "test_envs": [target],
            "trial_seed": trial,
            "hparams_seed": draw,
            **args,
        },
        "hparams": {"lr": 0.1},
        "step": step,
        **{f"env{i}_out_acc": 0.5 for i in range(len(args.get("domains", range(count))))},
        f"env{target}_in_acc": accuracy,
    }


def grid(dataset: str, algorithm: str, accuracies: list[list[float]], **args: Any) -> list[Record]:
    """Targets x trials."""
    return [
        record(dataset, algorithm, target, trial, accuracy, **args)
        for target, of_trials in enumerate(accuracies)
        for trial, accuracy in enumerate(of_trials)
    ]


def texts(table: Table) -> dict[str, list[str]]:
    return {row.head: [str(table.cell_text(row, cell)) for cell in row.cells] for row in table.rows}


# Numbers -----------------------------------------------------------------------------------------------------------


def test_by_hand() -> None:
    records = grid("PACS", "ERM", [[0.80, 0.82, 0.84], [0.7, 0.7, 0.7], [0.9, 0.96, 0.9], [0.6, 0.7, 0.8]])
    # sd of A: sqrt((2^2 + 0 + 2^2) / 2) = 2; P: sqrt((2^2 + 4^2 + 2^2) / 2) = 3.46; S: 10;
    # trial averages 75, 79.5, 81: mean 78.5, sd sqrt((3.5^2 + 1 + 2.5^2) / 2) = 3.12
    (table,) = tables(records, "training", "sd")
    assert table.columns == ["A", "C", "P", "S", "Avg"]
    assert texts(table) == {"ERM": ["82.0 ± 2.0", "70.0 ± 0.0", "92.0 ± 3.5", "70.0 ± 10.0", "78.5 ± 3.1"]}
    assert "standard deviation (n - 1)" in table.footnotes[0] and "3 trials" in table.footnotes[0]
    # se: A sqrt(8 / 3) / sqrt(3) = 0.94; P sqrt(24 / 3) / sqrt(3) = 1.63; S sqrt(200 / 3) / sqrt(3) = 4.71
    (table,) = tables(records, "training", "se")
    assert texts(table)["ERM"][:4] == ["82.0 ± 0.9", "70.0 ± 0.0", "92.0 ± 1.6", "70.0 ± 4.7"]
    assert "standard error" in table.footnotes[0]


def printed_by_domainbed(rows: list[Record], datasets: dict[str, int], algorithms: list[str]) -> dict[str, Any]:
    """The strings of DomainBed's tables, by its rules: 100 * mean, 100 * std(x / sqrt(n)), one decimal; the average of
    a row is the mean of its means, X where one is missing; over data sets trials are averaged over targets first."""

    def form(values: list[float]) -> tuple[float | None, str]:
        if not values:
            return None, "X"
        mean = 100 * float(np.mean(values))
        return mean, f"{mean:.1f} ± {100 * np.std(np.array(values) / np.sqrt(len(values))):.1f}"

    def line(cells: list[tuple[float | None, str]]) -> list[str]:
        means = [mean for mean, _ in cells if mean is not None]
        return [text for _, text in cells] + [f"{sum(means) / len(means):.1f}" if len(means) == len(cells) else "X"]

    def of(dataset: str, algorithm: str) -> list[Record]:
        return [row for row in rows if row["dataset"] == dataset and row["algorithm"] == algorithm]

    result: dict[str, Any] = {
        dataset: {
            algorithm: line(
                [
                    form([row["accuracy"] for row in of(dataset, algorithm) if row["target"] == target])
                    for target in range(targets)
                ]
            )
            for algorithm in algorithms
        }
        for dataset, targets in datasets.items()
    }
    result["All data sets"] = {
        algorithm: line(
            [
                form(
                    [
                        float(np.mean([row["accuracy"] for row in of(dataset, algorithm) if row["trial"] == trial]))
                        for trial in sorted({row["trial"] for row in of(dataset, algorithm)})
                    ]
                )
                for dataset in datasets
            ]
        )
        for algorithm in algorithms
    }
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["training", "oracle"])
def test_agrees_with_domainbed_to_the_last_digit(tmp_path: Path, seed: int, method: str) -> None:
    """A sweep on disk, some of its runs missing; trials enough that every cell has a spread."""
    generator = np.random.default_rng(seed)
    datasets, algorithms = {"PACS": 4, "VLCS": 4, "ColoredMNIST": 3}, ["ERM", "CORAL", "own"]
    number = 0
    for dataset, domains in datasets.items():
        for algorithm, target, trial, draw in [
            (a, t, r, d) for a in algorithms for t in range(domains) for r in range(3) for d in range(2)
        ]:
            gone = (algorithm, dataset, target, seed) == ("own", "VLCS", 1, 3)
            if gone or (trial == 2 and generator.random() < 0.3):
                continue
            lines = []
            for step in range(0, 300, 100):
                one = record(dataset, algorithm, target, trial, 0.0, draw, domains, step)
                one |= {
                    f"env{i}_{split}_acc": float(generator.random()) for i in range(domains) for split in ("in", "out")
                }
                lines.append(json.dumps(one, sort_keys=True) + "\n")
            folder = tmp_path / f"{number:04d}"
            folder.mkdir()
            (folder / "results.jsonl").write_text("".join(lines))
            number += 1
    records = read_runs(tmp_path)
    expected = printed_by_domainbed(select(records, method), datasets, algorithms)
    made = tables(records, method, "se")
    assert [table.title.split(",")[0] for table in made] == list(expected)
    for table in made:
        name = table.title.split(",")[0]
        ours = {head: [re.sub(r" \(\d+\)$", "", text) for text in row] for head, row in texts(table).items()}
        assert list(ours) == algorithms
        for algorithm in algorithms:
            assert ours[algorithm][:-1] == expected[name][algorithm][:-1]
            assert ours[algorithm][-1].split(" ")[0] == expected[name][algorithm][-1]


def test_missing_cells_and_uneven_trials() -> None:
    records = [
        *grid("PACS", "ERM", [[0.8, 0.9], [0.7, 0.7], [0.5, 0.5], [0.6]]),
        *grid("PACS", "IRM", [[0.8], [0.7], [0.5]]),
    ]
    (table,) = tables(records, "training", "sd")
    assert texts(table) == {
        "ERM": ["85.0 ± 7.1 (2)", "70.0 ± 0.0 (2)", "50.0 ± 0.0 (2)", "60.0 (1)", "66.2 (1)"],
        "IRM": ["80.0 (1)", "70.0 (1)", "50.0 (1)", "X", "X"],
    }
    assert "number in brackets" in table.footnotes[0] and "X: no result" in table.footnotes[0]
    assert table.footnotes[1].endswith("are of the trials that have every target: ERM.")
    assert table.footnotes[-1] == (
        "PACS lacks 6 finished runs: ERM, sketch, trial 1; IRM, art_painting, "
        "trial 1; IRM, cartoon, trial 1 and 3 more."
    )
    (table,) = tables(grid("PACS", "ERM", [[0.8], [0.7], [0.5], [0.6]]))
    assert texts(table) == {"ERM": ["80.0", "70.0", "50.0", "60.0", "65.0"]} and "one trial" in table.footnotes[0]
    assert len(table.footnotes) == 2  # the other says what the letters are


def test_targets_are_averaged_within_a_trial_first() -> None:
    records = [
        *grid("PACS", "ERM", [[0.8, 0.9], [0.7, 0.6], [0.5, 0.7], [0.6, 0.6]]),  # trials 65, 70
        *grid("VLCS", "ERM", [[0.5, 0.5]] * 4),
        *grid("VLCS", "AIDGN", [[0.5, 0.6]] * 3 + [[0.7]]),
    ]
    *_, table = tables(records, "training", "sd")
    assert table.columns == ["PACS", "VLCS", "Avg"]
    assert texts(table) == {"ERM": ["67.5 ± 3.5", "50.0 ± 0.0", "58.8"], "AIDGN": ["X", "57.5 ± 3.5", "X"]}
    assert any("AIDGN on VLCS" in note and "ERM" not in note for note in table.footnotes)


def test_best_is_bold_and_second_underlined_as_printed() -> None:
    def column(*means: float | None) -> Table:
        return Table("t", ["A"], [Row(str(i), [None if mean is None else Cell(mean)]) for i, mean in enumerate(means)])

    assert [marks[0] for marks in column(80.04, 81.2, 79.96, None, 50).marks()] == ["second", "best", "second", "", ""]
    assert [marks[0] for marks in column(80, 80, 70).marks()] == ["best", "best", "second"]
    assert [marks[0] for marks in column(80, None).marks()] == ["", ""]
    table = column(80, 70)
    table.rows.append(Row("paper", [Cell(99)], "paper"))
    assert [marks[0] for marks in table.marks()] == ["best", "second", ""]


def test_order_of_rows_and_columns() -> None:
    algorithms = ["own", "AIDGN-noR", "AIDGN", "RSC", "GroupDRO", "ERM", "AIDGN-release", "AIDGN-noRD", "ERM+SMA"]
    records = [
        one
        for dataset in ("own", "TerraIncognita", "PACS")
        for name in algorithms
        for one in grid(dataset, name, [[0.5]] * 4)
    ]
    made = tables(records)
    assert made[-1].columns == ["PACS", "TerraIncognita", "own", "Avg"]
    assert [row.head for row in made[0].rows] == [
        "ERM",
        "ERM+SMA",
        "GroupDRO",
        "RSC",
        "AIDGN",
        "AIDGN-noRD",
        "AIDGN-noR",
        "AIDGN-release",
        "own",
    ]
    assert made[1].columns == ["L100", "L38", "L43", "L46", "Avg"] and made[2].columns == ["0", "1", "2", "3", "Avg"]


def test_own_data_sets_show_the_names_of_their_domains() -> None:
    (table,) = tables(grid("cameras", "ERM", [[0.5], [0.5]], domains=["north", "south"]))
    assert table.columns == ["north", "south", "Avg"]
    (table,) = tables(grid("PACS", "ERM", [[0.5], [0.5]], domains=["north", "south"]))  # of that name, but not it
    assert table.columns == ["north", "south", "Avg"]
    (table,) = tables(
        [
            *grid("OfficeHome", "ERM", [[0.5]] * 4),
            *grid("OfficeHome", "IRM", [[0.5]] * 4, domains=["Art", "Clipart", "Product", "Real_World"]),
        ]
    )
    assert table.columns == ["A", "C", "P", "R", "Avg"]
    with pytest.raises(AidgnError, match=r"cameras are of different domains"):
        tables(
            [*grid("cameras", "ERM", [[0.5]], domains=["a", "b"]), *grid("cameras", "IRM", [[0.5]], domains=["b", "c"])]
        )


# The paper ---------------------------------------------------------------------------------------------------------


def test_paper_numbers_and_differences() -> None:
    accuracies = [[PAPER["PACS"]["rows"]["AIDGN"][letter]["mean"] / 100 + 0.01 * i] for i, letter in enumerate("ACPS")]
    (table,) = tables(grid("PACS", "AIDGN", accuracies), paper=True)
    assert [(row.head, row.kind) for row in table.rows] == [
        ("AIDGN", "ours"),
        ("paper", "paper"),
        ("difference", "difference"),
    ]
    assert texts(table)["paper"] == ["87.9 ± 0.4", "82.1 ± 0.2", "97.6 ± 0.1", "78.8 ± 0.9", "86.6"]
    assert texts(table)["difference"] == ["+0.0", "+1.0", "+2.0", "+3.0", "+1.5"]  # 88.1 - 86.6


def test_paper_rows_of_other_names() -> None:
    (table,) = tables(
        grid("VLCS", "ERM", [[0.7]] * 4)
        + grid("VLCS", "AIDGN-noR", [[0.7]] * 4)
        + grid("VLCS", "AIDGN-release", [[0.7]] * 4),
        paper=True,
    )
    assert [row.head for row in table.rows] == [
        "ERM",
        "paper",
        "difference",
        "paper, reproduced",
        "difference",
        "AIDGN-noR",
        "paper",
        "difference",
        "AIDGN-release",
    ]
    printed = [
        PAPER["VLCS"]["rows"]["ERM"],
        PAPER["VLCS"]["rows"]["ERM (reproduced)"],
        PAPER["ablation_vlcs"]["rows"]["AIDGN w/o R"],
    ]
    for row, numbers in zip([row for row in table.rows if row.kind == "paper"], printed, strict=True):
        assert [cell and cell.mean for cell in row.cells] == [numbers[c]["mean"] for c in ("C", "L", "S", "V", "Avg")]


def test_paper_over_data_sets_compares_like_with_like() -> None:
    names = ["PACS", "VLCS", "OfficeHome", "TerraIncognita"]
    *_, table = tables([one for name in names for one in grid(name, "ERM", [[0.7]] * 4)], paper=True)
    assert texts(table)["paper, reproduced"] == ["85.8 ± 0.2", "77.7 ± 0.4", "66.9 ± 0.2", "45.8 ± 1.5", "69.1"]
    *_, table = tables([one for name in names[:2] for one in grid(name, "ERM", [[0.7]] * 4)], "oracle", paper=True)
    assert texts(table)["paper, reproduced"] == ["85.8 ± 0.2", "77.7 ± 0.4", ""]  # its Avg is over four data sets
    assert any("training-domain validation" in note for note in table.footnotes)
    (table,) = tables(grid("cameras", "ERM", [[0.7]] * 2), paper=True)
    assert "The paper has no numbers for this table." in table.footnotes


def test_paper_averages_are_those_of_its_columns() -> None:
    """The file against itself: a wrongly copied number shows."""
    for table in PAPER:
        if table != "notes":
            for row in PAPER[table]["rows"].values():
                means = [row[column]["mean"] for column in PAPER[table]["columns"][:-1]]
                assert abs(sum(means) / len(means) - row["Avg"]["mean"]) < 0.2


# Notes -------------------------------------------------------------------------------------------------------------


def test_unfinished_runs_are_left_out_and_named(tmp_path: Path) -> None:
    for name, steps, accuracy in (("done", 100, 0.5), ("half", 200, 0.9)):
        (tmp_path / name).mkdir()
        lines = [json.dumps(record("PACS", "ERM", target, 0, accuracy, step=100, draw=steps)) for target in range(4)]
        (tmp_path / name / "results.jsonl").write_text("\n".join(lines) + '\n{"args": {')
        (tmp_path / name / "run.json").write_text(json.dumps({"steps": steps}))
    (table,) = tables(read_runs(tmp_path))
    assert texts(table) == {"ERM": ["50.0"] * 5}
    assert any("Unfinished runs left out: 4" in note and str(tmp_path / "half") in note for note in table.footnotes)
    assert any("cut in half by a crash, ignored: 2" in note for note in table.footnotes)
    (tmp_path / "half" / "begun").mkdir()
    (tmp_path / "half" / "begun" / "run.json").write_text('{"steps": 100}')
    with pytest.raises(AidgnError, match=r"yet: 0 of 5 runs are finished\.$"):
        tables(read_runs(tmp_path / "half"))


def test_unfinished_records_without_their_folder() -> None:
    long = grid("cameras", "ERM", [[0.9], [0.9]], domains=["a", "b"], steps=200, draw=1)
    short = grid("cameras", "ERM", [[0.5], [0.5]], domains=["a", "b"], steps=0)
    (table,) = tables(long + short)
    assert texts(table) == {"ERM": ["50.0"] * 3}


def test_domainbed_runs_that_stopped_early(tmp_path: Path) -> None:
    for target, step in enumerate((5000, 5000, 300, 5000)):  # without --steps, DomainBed writes null
        (tmp_path / str(target)).mkdir()
        (tmp_path / str(target) / "results.jsonl").write_text(
            json.dumps(record("PACS", "ERM", target, 0, 0.5, step=step, **{"steps": None})) + "\n"
        )
    (table,) = tables(read_runs(tmp_path))
    assert texts(table) == {"ERM": ["50.0"] * 5}
    assert f"Runs that stopped before the others, counted as DomainBed does: 1 ({tmp_path / '2'})." in table.footnotes
    assert not any("stopped" in note for note in tables(grid("PACS", "ERM", [[0.5]] * 4))[0].footnotes)


def test_mixtures_are_told() -> None:
    records = [
        *grid("PACS", "ERM", [[0.5]] * 4, backbone="resnet18"),
        *grid("PACS", "IRM", [[0.5]] * 4, backbone="resnet50"),
    ]
    assert (
        "The runs of PACS differ in backbone: resnet18 (4 runs: ERM); resnet50 (4 runs: IRM)."
        in tables(records)[0].footnotes
    )


def test_mixtures_are_told_below_the_tables_they_are_in() -> None:
    records = [record("PACS", "ERM", 0, trial, 0.5, step=steps, steps=steps) for trial, steps in enumerate((120, 30))]
    made = tables([*records, *grid("VLCS", "ERM", [[0.5]])])
    told = [[note for note in table.footnotes if "differ in" in note] for table in made]
    note = (
        "The runs of PACS differ in steps: 30 (1 run: trial 1); 120 (1 run: trial 0). Runs of ERM have several of "
        "these values."
    )
    assert told == [[note], [], [note]]


IDENTITY = {
    "target": [],
    "steps": 10,
    "eval_every": 5,
    "image_size": 224,
    "backbone": "resnet18",
    "weights": "hub",
    "lr_milestones": [],
    "average": None,
    "augment_validation": False,
    "evaluate_source_in": False,
    "data": f"{'a' * 32}-{'b' * 32}",
    "precision": "float32",
}


def write_run(
    root: Path,
    algorithm: str = "ERM",
    target: int = 0,
    trial: int = 0,
    draw: int = 0,
    hparams: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run folder as training writes it, with these settings in run.json and, as far as they stand there, in args."""
    folder = root / f"{len(list(root.glob('*'))):03d}"
    folder.mkdir(parents=True)
    identity = (
        IDENTITY
        | {
            "dataset": "PACS",
            "algorithm": algorithm,
            "trial": trial,
            "draw": draw,
            "hyper_parameters": hparams or {"lr": 0.1},
        }
        | settings
    )
    in_args = {key: identity[key] for key in ("steps", "backbone", "weights", "precision")}
    one = record("PACS", algorithm, target, trial, 0.5, draw, step=identity["steps"], **in_args)
    one["hparams"] = identity["hyper_parameters"]
    (folder / "results.jsonl").write_text(json.dumps(one) + "\n")
    (folder / "run.json").write_text(json.dumps({"identity": identity, "steps": identity["steps"]}))
    return folder


def told_differences(root: Path) -> list[str]:
    return [note for note in tables(read_runs(root))[0].footnotes if "differ in" in note]


@pytest.mark.parametrize(
    ("name", "usual", "other"),
    [
        ("image_size", "224", 112),
        ("augment_validation", "no", True),
        ("precision", "float32", "bfloat16"),
        ("eval_every", "5", 2),
        ("train_only", "none", "last-stage"),
        ("average", "none", "sma:3"),
        ("lr_milestones", "[]", [3, 5]),
        ("weights", "hub", "none"),
        ("an_option_of_tomorrow", "none", 7),
    ],
)
def test_settings_mixed_in_a_cell_are_told(tmp_path: Path, name: str, usual: str, other: Any) -> None:
    for trial in range(3):
        write_run(tmp_path, trial=trial)
    assert told_differences(tmp_path) == []
    write_run(tmp_path, trial=3, **{name: other})
    (note,) = told_differences(tmp_path)
    (difference,) = differences(read_runs(tmp_path).runs)
    assert difference.name == name and difference.mixed == ["ERM"] and note == str(difference)
    text = "yes" if other is True else str(other)
    assert {value: len(runs) for value, runs in difference.runs.items()} == {usual: 3, text: 1}
    assert f"{text} (1 run: trial 3)" in note and f"{usual} (3 runs: trial 0, 1, 2)" in note


def test_settings_that_differ_between_rows_are_told(tmp_path: Path) -> None:
    for target in range(2):
        write_run(tmp_path, "ERM", target)
        write_run(tmp_path, "AIDGN", target, lr_milestones=[3], hparams={"lr": 0.5, "kappa": 1})  # its own schedule
    assert told_differences(tmp_path) == []
    for target in range(2):
        write_run(tmp_path, "IRM", target, image_size=112, data="other")
    image_size, data = differences(read_runs(tmp_path).runs)
    assert (image_size.name, image_size.mixed) == ("image_size", [])
    assert str(image_size).endswith("112 (2 runs: IRM); 224 (4 runs: AIDGN, ERM).")
    assert list(data.runs) == ["aaaaaaaa-bbbbbbbb", "other"]
    assert told_differences(tmp_path) == [str(image_size), str(data)]


def test_rows_with_more_draws_to_choose_from_are_told(tmp_path: Path) -> None:
    for draw in range(3):
        write_run(tmp_path, "ERM", draw=draw, hparams={"lr": 0.1 + draw})
    assert told_differences(tmp_path) == []
    write_run(tmp_path, "IRM")
    assert told_differences(tmp_path) == [
        "The runs of PACS differ in number of runs to choose from: 1 (1 run: IRM); 3 (3 runs: ERM)."
    ]


def test_rows_with_more_values_to_choose_from_are_told(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        write_run(tmp_path, "ERM", hparams={"lr": lr})
    write_run(tmp_path, "IRM")
    assert any("number of runs to choose from: 1 (1 run: IRM); 2" in note for note in told_differences(tmp_path))


@pytest.mark.parametrize("place", [{"trial": 1}, {"target": 1}])
def test_a_row_over_different_images_is_refused(tmp_path: Path, place: dict[str, int]) -> None:
    one = write_run(tmp_path)
    other = write_run(tmp_path, data="changed", **place)
    with pytest.raises(AidgnError, match="different images of PACS") as refused:
        tables(read_runs(tmp_path))
    assert str(one) in str(refused.value) and str(other) in str(refused.value)


def test_runs_without_identity_are_compared_in_what_is_known(tmp_path: Path) -> None:
    """A run of DomainBed says nothing of image size and the like: that is no difference."""
    write_run(tmp_path, trial=0)
    theirs = write_run(tmp_path, trial=1)
    (theirs / "run.json").unlink()
    assert told_differences(tmp_path) == []
    theirs = write_run(tmp_path, trial=2, precision="bfloat16")
    (theirs / "run.json").unlink()
    (note,) = told_differences(tmp_path)
    assert "precision: bfloat16 (1 run: trial 2); float32 (2 runs: trial 0, 1)" in note


def test_nothing_to_tabulate() -> None:
    one = record("PACS", "ERM", 0, 0, 0.5)
    with pytest.raises(AidgnError, match="trained on all domains"):
        tables([{**one, "args": {**one["args"], "test_envs": []}}])
    with pytest.raises(AidgnError, match="each pair of domains"):
        tables(grid("PACS", "ERM", [[0.5]]), "leave-one-out")
    with pytest.raises(UnknownNameError, match="std"):
        tables(grid("PACS", "ERM", [[0.5]]), spread="std")


# Forms -------------------------------------------------------------------------------------------------------------

HOSTILE = Table(
    "R&D_<b>",
    ["A|B", "50%"],
    [
        Row("<script>[bold]*x*", [Cell(80.0, 1.25, 3), None]),
        Row("ERM_2", [Cell(70.0, 0.5, 3), Cell(60.0, None, 3)]),
        Row("paper", [Cell(75.0), None], "paper"),
        Row("difference", [Cell(-5.0), None], "difference"),
    ],
    ["a ~ note_1"],
)


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[list[str]] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag == "br":
            return
        self.open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"th", "td"} & set(self.open):
            marks = {"strong": "bold:", "u": "second:"}
            self.cells[-1][-1] += "".join(marks.get(tag, "") for tag in self.open) + data


def test_html_is_well_formed_and_escaped() -> None:
    reader = Reader()
    reader.feed(FORMATS["html"](HOSTILE))
    reader.close()
    assert not reader.open and "script" not in reader.seen and "b" not in reader.seen
    assert reader.cells == [
        ["Algorithm", "A|B", "50%"],
        ["<script>[bold]*x*", "bold:80.0 ± 1.2", "X"],
        ["ERM_2", "second:70.0 ± 0.5", "60.0"],
        ["paper", "75.0", ""],
        ["difference", "-5.0", ""],
    ]


def test_markdown() -> None:
    lines = FORMATS["markdown"](HOSTILE).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 4 for line in table)
    assert table[2:4] == [r"| \<script\>\[bold\]\*x\* | **80.0 ± 1.2** | X |", r"| ERM\_2 | <u>70.0 ± 0.5</u> | 60.0 |"]
    assert lines[0] == r"### R&D\_\<b\>" and lines[-1].strip() == r"a ~ note\_1"


def test_latex() -> None:
    text = FORMATS["latex"](HOSTILE)
    assert r"\textbf{80.0 $\pm$ 1.2} & X \\" in text and r"ERM\_2 & \underline{70.0 $\pm$ 0.5} & 60.0 \\" in text
    assert r"\quad difference & $-5.0$ &  \\" in text and r"Algorithm & A\textbar{}B & 50\% \\" in text
    assert r"\caption{R\&D\_\textless{}b\textgreater{}. a \textasciitilde{} note\_1}" in text
    assert [text.count(rule) for rule in (r"\toprule", r"\midrule", r"\bottomrule")] == [1, 1, 1]
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}") and text.count(r"\begin") == text.count(r"\end")
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", row)) for row in rows} == {2}


def test_terminal() -> None:
    text = FORMATS["terminal"](HOSTILE)
    assert "\x1b[1m80.0 ± 1.2\x1b[0m" in text and "\x1b[4m70.0 ± 0.5\x1b[0m" in text
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert "<script>[bold]*x*" in plain and "a ~ note_1" in plain and "R&D_<b>" in plain
    (row,) = [line.split() for line in plain.splitlines() if "ERM_2" in line]
    assert row == ["ERM_2", "70.0", "±", "0.5", "60.0"]


# All records -------------------------------------------------------------------------------------------------------


def test_all_records_as_csv(tmp_path: Path) -> None:
    records = [*grid("PACS", "ERM", [[0.5, 0.25]] * 2), *grid("cameras", "DANN", [[0.125]], domains=["a,b", "c"])]
    records[-1]["hparams"] = {"lambda": 3, "sizes": [1, 2]}
    all_records_csv(records, tmp_path / "all.csv")
    with (tmp_path / "all.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 5
    assert [(line["dataset"], line["target"], line["trial"], line["step"]) for line in lines] == [
        ("PACS", "art_painting", "0", "0"),
        ("PACS", "art_painting", "1", "0"),
        ("PACS", "cartoon", "0", "0"),
        ("PACS", "cartoon", "1", "0"),
        ("cameras", "a,b", "0", "0"),
    ]
    assert [line["env0_in_acc"] for line in lines] == ["0.5", "0.25", "", "", "0.125"]
    assert lines[-1]["hparams.dann_lambda"] == "3" and lines[-1]["hparams.sizes"] == "[1, 2]"
    assert lines[0]["hparams.lr"] == "0.1" and lines[-1]["hparams.lr"] == ""


def test_rows_with_names_that_are_no_text(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", ["file"], [["caf\udce9.png"]])
    assert (tmp_path / "rows.csv").read_text() == "file\ncaf?.png\n"


def test_all_records_as_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = grid("RotatedMNIST", "ERM", [[0.5, 0.25]])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AidgnError, match=r"pip install .aidgn\[parquet\]"):
        all_records_csv(records, tmp_path / "all.parquet")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    parquet = pytest.importorskip("pyarrow.parquet")
    all_records_csv(records, tmp_path / "all.parquet")
    table = parquet.read_table(tmp_path / "all.parquet").to_pylist()
    assert [(row["target"], row["trial"], row["env0_in_acc"]) for row in table] == [("0", 0, 0.5), ("0", 1, 0.25)]


# Other metrics -----------------------------------------------------------------------------------------------------


def with_metrics(algorithm: str, accuracy: float, **metrics: list[float]) -> list[Record]:
    """A record per trial with one target, PACS's first."""
    return [
        record("PACS", algorithm, 0, trial, accuracy, domains=["a", "b"])
        | {f"env0_in_{name}": values[trial] for name, values in metrics.items()}
        for trial in range(2)
    ]


def test_metrics_by_hand() -> None:
    records = with_metrics("ERM", 0.9, macro_f1=[0.5, 0.7], nll=[0.1234, 0.1236])
    records += with_metrics("AIDGN", 0.8, macro_f1=[0.4, 0.4], nll=[2.0, 3.0])
    (f1,) = tables(records, metric="macro_f1")
    # sd of 50 and 70: sqrt((10^2 + 10^2) / 1) = 14.1
    assert texts(f1)["ERM"][0] == "60.0 ± 14.1" and texts(f1)["AIDGN"][0] == "40.0 ± 0.0"
    assert f1.marks()[0][0] == "best" and "Macro-F1 (%)" in f1.footnotes[0]
    (nll,) = tables(records, metric="nll")
    assert [texts(nll)[name][0] for name in ("ERM", "AIDGN")] == ["0.123 ± 0.000", "2.500 ± 0.707"]
    assert [marks[0] for marks in nll.marks()] == ["best", "second"]  # the lower is the better
    assert "lower is better" in nll.footnotes[0] and "%)" not in nll.footnotes[0]


def test_the_metric_of_uneven_classes() -> None:
    """Data of one's own show macro-F1 from ten times the images, published data what their papers show."""

    def shown(name: str, class_images: list[int], metric: str | None = None) -> tuple[str, str]:
        records = with_metrics("ERM", 0.9, macro_f1=[0.5, 0.7])
        for line in records:
            line["args"] = {**line["args"], "dataset": name}
        loaded = as_records(records)
        for run in loaded.runs[:1]:  # others may be older
            run.metadata = RunMetadata(class_images=class_images)
        (table,) = tables(loaded, metric=metric)
        return table.metric, " ".join(note for note in table.notes if "--metric" in note)

    assert shown("own", [10, 99]) == ("accuracy", "") == shown("own", [])
    assert shown("PACS", [10, 99]) == ("accuracy", "") == shown("own", [10, 100], "accuracy")
    metric, note = shown("own", [10, 100])
    assert metric == "macro_f1" and "100" in note and "--metric accuracy" in note
    metric, note = shown("PACS", [10, 100])
    assert metric == "accuracy" and "published" in note and "--metric macro_f1" in note
    assert shown("iWildCam-official", [10, 11])[0] == "macro_f1"


def test_the_metric_selects_nothing() -> None:
    """The step is that of the best validation accuracy, whatever the metric says there."""
    early, late = (record("PACS", "ERM", 0, 0, 0.5, step=step) for step in (1, 2))
    early |= {"env1_out_acc": 0.9, "env0_in_macro_f1": 0.1}
    late |= {"env1_out_acc": 0.1, "env0_in_macro_f1": 0.8}
    (table,) = tables([early, late], metric="macro_f1")
    assert texts(table)["ERM"][0] == "10.0"


def test_records_without_the_metric() -> None:
    old = grid("PACS", "ERM", [[0.8, 0.7]], domains=["a", "b"])
    with pytest.raises(AidgnError, match="2 selected runs"):
        tables(old, metric="ece")
    (table,) = tables(old + with_metrics("AIDGN", 0.8, ece=[0.1, 0.3]), metric="ece")
    assert texts(table)["ERM"][0] == "X" and texts(table)["AIDGN"][0].startswith("20.0")
    assert any("2 selected runs" in note for note in table.notes)
    with pytest.raises(UnknownNameError, match="macro_f1"):
        tables(old, metric="macro")
    with pytest.raises(AidgnError, match="paper"):
        tables(old, paper=True, metric="ece")
