"""Reading records and selecting runs, against selection written out naively over the raw records."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aidgn.runs.reader
from aidgn.errors import AidgnError
from aidgn.runs.reader import read_runs
from aidgn.selection import load_records, select

Record = dict[str, Any]


def record(
    step: int,
    accuracies: dict[str, float],
    dataset: str = "PACS",
    algorithm: str = "ERM",
    targets: tuple[int, ...] = (0,),
    trial: int = 0,
    draw: int = 0,
    **more: Any,
) -> Record:
    """A record as DomainBed writes it."""
    args = {
        "dataset": dataset,
        "algorithm": algorithm,
        "test_envs": list(targets),
        "trial_seed": trial,
        "hparams_seed": draw,
        "hparams": None,
        "output_dir": "/somewhere",
        "steps": None,
        "seed": hash((targets, trial, draw)) % 1000,
        "task": "domain_generalization",
    }
    return {
        "args": args,
        "hparams": {"lr": 0.001 * (draw + 1), "batch_size": 32},
        "step": step,
        "loss": 0.5,
        **accuracies,
        **more,
    }


def write(folder: Path, records: list[Record], sort_keys: bool = True, **style: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(one, sort_keys=sort_keys, **style) for one in records]
    (folder / "results.jsonl").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return folder


def accuracies(out: list[float], inside: list[float]) -> dict[str, float]:
    return {
        **{f"env{i}_out_acc": value for i, value in enumerate(out)},
        **{f"env{i}_in_acc": value for i, value in enumerate(inside)},
    }


def random_sweep(seed: int, levels: int = 4, missing: float = 0.15) -> list[list[Record]]:
    """Runs with one and two targets; few distinct accuracies, so that ties abound; some runs and records missing."""
    generator = np.random.default_rng(seed)
    runs = []
    for algorithm, trial, draw in [(a, t, d) for a in ("ERM", "AIDGN") for t in range(2) for d in range(4)]:
        for targets in [*combinations(range(3), 1), *combinations(range(3), 2)]:
            if generator.random() < missing / 4:
                continue
            steps = [step for step in range(0, 50, 10) if step == 0 or generator.random() > missing]
            values = generator.integers(1, levels + 1, (len(steps), 2, 3)) / levels
            runs.append(
                [
                    record(
                        step,
                        accuracies(list(out), list(inside)),
                        algorithm=algorithm,
                        targets=targets,
                        trial=trial,
                        draw=draw,
                    )
                    for step, (out, inside) in zip(steps, values.tolist(), strict=True)
                ]
            )
    generator.shuffle(runs)  # type: ignore[arg-type]
    return runs


def naive(records: list[Record], method: str) -> dict[tuple[str, str, int, int], tuple[float, int, int]]:
    """The three methods of the protocol, record by record: (accuracy, step, draw) per place in the table."""
    places = {
        (r["args"]["dataset"], r["args"]["algorithm"], target, r["args"]["trial_seed"])
        for r in records
        for target in r["args"]["test_envs"]
    }
    chosen = {}
    for dataset, algorithm, target, trial in places:
        mine = [
            r
            for r in records
            if r["args"]["dataset"] == dataset
            and r["args"]["algorithm"] == algorithm
            and r["args"]["trial_seed"] == trial
            and target in r["args"]["test_envs"]
        ]
        best: tuple[float, float, int, int] | None = None
        for draw in sorted({r["args"]["hparams_seed"] for r in mine}):  # a later draw wins a tie
            of_draw = [r for r in mine if r["args"]["hparams_seed"] == draw]
            single = sorted((r for r in of_draw if r["args"]["test_envs"] == [target]), key=lambda r: r["step"])
            candidate: tuple[float, float, int, int] | None = None
            for r in single:
                domains = [i for i in range(10) if f"env{i}_out_acc" in r]
                sources = [i for i in domains if i != target]
                if method == "training":
                    validation = sum(r[f"env{i}_out_acc"] for i in sources) / len(sources)
                elif method == "oracle":
                    if r is not single[-1]:
                        continue
                    validation = r[f"env{target}_out_acc"]
                else:
                    held = [
                        [
                            q[f"env{i}_in_acc"]
                            for q in of_draw
                            if sorted(q["args"]["test_envs"]) == sorted([i, target]) and q["step"] == r["step"]
                        ]
                        for i in sources
                    ]
                    if not all(held):
                        continue
                    validation = sum(values[0] for values in held) / len(sources)
                if not math.isnan(validation) and (candidate is None or validation > candidate[0]):
                    candidate = (validation, r[f"env{target}_in_acc"], r["step"], draw)
            if candidate is not None and (best is None or candidate[0] >= best[0]):
                best = candidate
        if best is not None:
            chosen[dataset, algorithm, target, trial] = best[1:]
    return chosen


def as_dict(rows: list[Record]) -> dict[tuple[str, str, int, int], tuple[float, int, int]]:
    return {
        (row["dataset"], row["algorithm"], row["target"], row["trial"]): (
            row["accuracy"],
            row["step"],
            row["hparams_seed"],
        )
        for row in rows
    }


# Selection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["training", "leave-one-out", "oracle"])
def test_selection_agrees_with_the_naive_one(tmp_path: Path, method: str) -> None:
    selected = 0
    for seed in range(8):
        runs = random_sweep(seed, levels=(2, 4, 1000)[seed % 3])
        flat = [one for run in runs for one in run]
        for number, run in enumerate(runs):
            write(tmp_path / str(seed) / f"{number:03d}", run)
        records = read_runs(tmp_path / str(seed))
        expected = naive(flat, method)
        assert as_dict(select(records, method)) == expected
        assert as_dict(select(flat, method)) == expected  # any list of records will do
        assert as_dict(select(flat[::-1], method)) == expected  # in any order
        selected += len(expected)
    assert selected > 50


def test_earliest_step_and_highest_draw_win_ties() -> None:
    flat = accuracies([0.1, 0.75, 0.75], [0.3, 0, 0])
    later = accuracies([0.9, 1.0, 0.5], [0.9, 0, 0])  # the same mean, a better target accuracy: must not matter
    records = [
        record(0, accuracies([0.1, 0.5, 0.5], [0.1, 0, 0]), draw=2),
        record(10, flat, draw=2),
        record(20, later, draw=2),
        record(0, later, draw=1),
    ]
    (row,) = select(records, "training")
    assert row == {
        "dataset": "PACS",
        "algorithm": "ERM",
        "target": 0,
        "trial": 0,
        "accuracy": 0.3,
        "step": 10,
        "hparams_seed": 2,
        "target_name": "art_painting",
    }


def test_draw_ten_is_above_draw_nine() -> None:
    same = accuracies([0, 0.5, 0.5], [0.2, 0, 0])
    assert [
        select([record(0, same, draw=10), record(0, same, draw=9)], method)[0]["hparams_seed"]
        for method in ("training", "oracle")
    ] == [10, 10]


def test_oracle_looks_at_the_last_step_only() -> None:
    records = [
        record(0, accuracies([0.9, 0, 0], [0.9, 0, 0])),
        record(10, accuracies([0.2, 0, 0], [0.4, 0, 0])),
        record(0, accuracies([0.3, 0, 0], [0.1, 0, 0]), draw=1),
        record(10, accuracies([0.3, 0, 0], [0.6, 0, 0]), draw=1),
    ]
    (row,) = select(records, "oracle")
    assert (row["accuracy"], row["step"], row["hparams_seed"]) == (0.6, 10, 1)


def test_leave_one_out_by_hand_and_incomplete() -> None:
    own = [record(0, accuracies([0, 0, 0], [0.5, 0, 0])), record(10, accuracies([0, 0, 0], [0.6, 0, 0]))]
    held_1 = [
        record(0, accuracies([0, 0, 0], [0, 0.2, 0]), targets=(0, 1)),
        record(10, accuracies([0, 0, 0], [0, 0.9, 0]), targets=(0, 1)),
    ]
    held_2 = [record(0, accuracies([0, 0, 0], [0, 0, 0.4]), targets=(0, 2))]
    (row,) = select(own + held_1 + held_2, "leave-one-out")  # step 10 would win, but lacks domain 2
    assert (row["accuracy"], row["step"]) == (0.5, 0)
    assert select(own + held_1, "leave-one-out") == []
    other = [{**one, "hparams": {"lr": 1.0}} for one in held_2]
    assert select(own + held_1 + other, "leave-one-out") == []  # not the same hyper-parameters


def test_runs_with_two_targets_are_not_used_by_the_others() -> None:
    pair = [record(0, accuracies([1, 1, 1], [1, 1, 1]), targets=(0, 1))]
    assert select(pair, "training") == select(pair, "oracle") == []


def test_nan_never_wins(tmp_path: Path) -> None:
    nan = float("nan")
    runs = [record(0, accuracies([0, nan, 1], [0.9, 0, 0])), record(10, accuracies([0, 0.1, 0.1], [0.2, 0, 0]))]
    only = [record(0, accuracies([nan, nan, nan], [0.9, 0, 0]), trial=1)]
    write(tmp_path / "a", runs), write(tmp_path / "b", only)
    (row,) = select(read_runs(tmp_path), "training")
    assert (row["trial"], row["step"], row["accuracy"]) == (0, 10, 0.2)


def test_source_out_accuracies_suffice() -> None:
    ours = {"env0_out_acc": 0.1, "env1_out_acc": 0.5, "env2_out_acc": 0.7, "env1_in_acc": 0.4}
    (row,) = select([record(50, ours, targets=(1,))], "training")
    assert row["accuracy"] == 0.4
    with pytest.raises(AidgnError, match="env1_in_acc"):
        select([record(50, {key: ours[key] for key in ours if key != "env1_in_acc"}, targets=(1,))], "training")


def test_unknown_method_names_the_nearest() -> None:
    with pytest.raises(AidgnError, match=r"trainig.*Did you mean training\?"):
        select([], "trainig")


# Reading -----------------------------------------------------------------------------------------------------------


def some_run(**more: Any) -> list[Record]:
    return [record(step, accuracies([0.1, 0.2, step / 100], [0.4, 0.5, 0.6]), **more) for step in range(0, 40, 10)]


def test_iterates_like_a_list_of_dicts(tmp_path: Path) -> None:
    first, second = some_run(), some_run(draw=1)
    write(tmp_path / "sweep" / "deep" / "a", first), write(tmp_path / "sweep" / "b", second)
    records = read_runs(tmp_path)
    expected = [*second, *first]  # sweep/b comes before sweep/deep/a
    assert list(records) == expected and len(records) == 8 and load_records(tmp_path) == expected
    assert {type(one) for one in records} == {dict} and {type(one["step"]) for one in records} == {int}
    assert list(read_runs(tmp_path / "sweep" / "b")) == second
    assert list(read_runs(tmp_path / "sweep" / "b" / "results.jsonl")) == second
    assert list(read_runs(tmp_path / "sweep" / "deep", str(tmp_path / "sweep" / "b"))) == [*first, *second]


@pytest.mark.parametrize(
    ("algorithm", "ours"), [("DANN", "dann_lambda"), ("CDANN", "dann_lambda"), ("Fishr", "fishr_lambda")]
)
def test_domainbed_names_of_hyper_parameters(algorithm: str, ours: str, tmp_path: Path) -> None:
    one = {**record(0, {}, algorithm=algorithm), "hparams": {"lambda": 3.0}}
    assert read_runs(write(tmp_path, [one])).runs[0].hparams == {ours: 3.0}


@pytest.mark.parametrize("style", [{}, {"separators": (",", ":")}, {"sort_keys": False}, {"ensure_ascii": False}])
def test_plain_files_are_not_parsed_in_full(tmp_path: Path, style: dict[str, Any]) -> None:
    run = some_run(dataset="Bücher")
    records = read_runs(write(tmp_path, run, **style))
    assert list(records) == run
    assert isinstance(records.runs[0].rest, bytes)
    assert select(records, "training") == select(run, "training")


def test_lists_of_numbers_are_read_quickly(tmp_path: Path) -> None:
    run = [{**each, "env0_in_class_accuracy": [0.5, 1, 1e-05, None]} for each in some_run()]
    records = read_runs(write(tmp_path, run))
    assert list(records) == run
    assert isinstance(records.runs[0].rest, bytes)
    assert select(records, "training") == select(run, "training")


TRICKS: dict[str, dict[str, Any]] = {
    "nested": {"norms": {"env0_out_acc": 1.0, "step": 7}},
    "list": {"confusion": [[1, 2], [3, 4]]},
    "list of texts": {"said": ["step", "env0_out_acc", ":", "0.9"]},
    "null": {"env1_out_acc": None},
    "text": {"comment": 'said "step": 1, "args": {"a": 1}, "env2_out_acc": 5}\n{'},
    "same args elsewhere": {"aaa": {"args": record(0, {})["args"], "hparams": {"lr": 0.001, "batch_size": 32}}},
    "braces": {"comment": "}{"},
}


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("sort_keys", [False, True])
def test_unusual_records_are_read_as_json_reads_them(tmp_path: Path, trick: str, sort_keys: bool) -> None:
    run = some_run()
    for at in (0, 2):
        for which in ([at], range(4)):
            changed = [{**one, **(TRICKS[trick] if i in which else {})} for i, one in enumerate(run)]
            records = read_runs(write(tmp_path, changed, sort_keys=sort_keys))
            assert list(records) == changed
            assert select(records, "oracle") == select(changed, "oracle")
            if trick != "null":
                assert as_dict(select(records, "training")) == naive(changed, "training")


def test_one_record_of_other_args_is_a_run_of_its_own(tmp_path: Path) -> None:
    run = [*some_run(), record(40, accuracies([0, 0.1, 0.1], [0.8, 0, 0]), trial=1)]
    records = read_runs(write(tmp_path, run))
    assert list(records) == run and len(records.runs) == 2
    assert [row["trial"] for row in select(records, "training")] == [0, 1]


def test_cut_last_line_is_ignored_wherever_it_is_cut(tmp_path: Path) -> None:
    run = some_run()
    text = (write(tmp_path, run) / "results.jsonl").read_bytes()
    start = text.rindex(b"\n", 0, -1) + 1
    for cut in [*range(start + 1, len(text) - 1, 23), len(text) - 2]:
        (tmp_path / "results.jsonl").write_bytes(text[:cut])
        records = read_runs(tmp_path)
        assert list(records) == run[:-1] and records.cut == 1
    for whole in (text[:-1], text, text + b"\n", text.replace(b"\n", b"\r\n")):
        (tmp_path / "results.jsonl").write_bytes(whole)
        assert list(read_runs(tmp_path)) == run and read_runs(tmp_path).cut == 0
    (tmp_path / "results.jsonl").write_bytes(text + b"\0" * 100 + b"\n")
    assert list(read_runs(tmp_path)) == run and read_runs(tmp_path).cut == 1


def test_broken_line_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    lines = (write(tmp_path, some_run()) / "results.jsonl").read_bytes().splitlines(keepends=True)
    for broken in (
        b'{"args": {"data\n',
        lines[1][:-40] + b"\n",
        lines[1][:-40],
        b"[1]\n",
        b"\0\0\0\n",
        b"\xff\n",
        lines[1].replace(b'"step": 10', b'"step": 1.2.3'),
    ):
        (tmp_path / "results.jsonl").write_bytes(b"".join([lines[0], broken, *lines[2:]]))
        with pytest.raises(AidgnError, match=r"results\.jsonl, line 2 "):
            select(read_runs(tmp_path))


def test_records_that_lack_keys_are_refused(tmp_path: Path) -> None:
    for key in ("dataset", "algorithm", "test_envs", "trial_seed", "hparams_seed"):
        run = some_run()
        for one in run:
            del one["args"][key]
        with pytest.raises(AidgnError, match=rf"results\.jsonl, line 1: .*args\.{key}"):
            read_runs(write(tmp_path, run))
    for key in ("args", "hparams", "step"):
        run = some_run()
        del run[2][key]
        with pytest.raises(AidgnError, match=rf"line 3: .* {key}"):
            read_runs(write(tmp_path, run))
    for key, value in (
        ("test_envs", [-1]),
        ("test_envs", [10**9]),
        ("test_envs", ["a"]),
        ("domains", 3),
        ("domains", [1, 2, 3]),
    ):
        run = some_run()
        for one in run:
            one["args"][key] = value
        with pytest.raises(AidgnError, match=rf"line 1: .*args\.{key} "):
            read_runs(write(tmp_path, run))
    with pytest.raises(AidgnError, match=r"Record 0: .* args"):
        select([{"step": 1}])


@pytest.mark.parametrize(
    "value", ["1.5", "-0.1", "57", "1.0001", "1e3", "0.5e3", "2e-0", "Infinity", "true", "false", '"0.5"', "[0.5]"]
)
@pytest.mark.parametrize("colon", [":", ": ", " : "])
def test_accuracies_that_are_none_are_refused(tmp_path: Path, value: str, colon: str) -> None:
    for key in ("env1_out_acc", "env2_in_acc", "env0_uda_acc"):
        for line in (0, 2, 3):
            lines = [json.dumps({**one, "env0_uda_acc": 0.5}) for one in some_run()]
            lines[line] = re.sub(rf'"{key}": [^,}}]+', f'"{key}"{colon}{value}', lines[line])
            write(tmp_path, [])
            (tmp_path / "results.jsonl").write_text("".join(text + "\n" for text in lines))
            with pytest.raises(AidgnError) as refused:
                read_runs(tmp_path)
            assert f"results.jsonl, line {line + 1}: {key} is " in str(refused.value)
            assert json.dumps(json.loads(value)) in str(refused.value)
    with pytest.raises(AidgnError, match=r"Record 3: env0_uda_acc is "):
        select([json.loads(text) for text in lines])


@pytest.mark.parametrize(
    "value", ["0", "1", "0.0", "1.0", "1.00", "-0.0", "1e-05", "2.5e-07", "1E-5", "5e-1", "NaN", "null"]
)
def test_accuracies_at_the_bounds_are_read(tmp_path: Path, value: str) -> None:
    lines = [json.dumps(one).replace('"env1_in_acc": 0.5', f'"env1_in_acc": {value}') for one in some_run()]
    write(tmp_path, [])
    (tmp_path / "results.jsonl").write_text("".join(text + "\n" for text in lines))
    expected = json.loads(value)
    for one in read_runs(tmp_path):
        assert one["env1_in_acc"] == expected or math.isnan(expected)


def test_booleans_are_no_numbers(tmp_path: Path) -> None:
    for line in (0, 1, 3):
        run = some_run()
        run[line]["step"] = True
        with pytest.raises(AidgnError, match=rf"line {line + 1}: .*step = true"):
            read_runs(write(tmp_path, run))
    for key, value in (("trial_seed", True), ("hparams_seed", False), ("test_envs", [True])):
        run = some_run()
        for one in run:
            one["args"][key] = value
        with pytest.raises(AidgnError, match=rf"line 1: .*args\.{key} = "):
            read_runs(write(tmp_path, run))
    run = some_run(comment="a true story", converged=True)
    assert list(read_runs(write(tmp_path, run))) == run


def test_records_of_a_later_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AidgnError, match="version 2"):
        read_runs(write(tmp_path, some_run(version=2)))


def test_folders_without_records(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text("trials: 3")
    with pytest.raises(AidgnError, match=r"sweep\.yaml is no"):
        read_runs(tmp_path / "sweep.yaml")
    (tmp_path / "sweep.yaml").unlink()
    with pytest.raises(AidgnError, match="nowhere does not"):
        read_runs(tmp_path / "nowhere")
    with pytest.raises(AidgnError, match=r"There is no results\.jsonl"):
        read_runs(tmp_path)
    write(tmp_path / "empty", [])
    assert len(read_runs(tmp_path)) == 0 and read_runs(tmp_path).unfinished == [tmp_path / "empty"]
    for name, files in {"begun": ["run.json"], "kept": ["run.json", "model.safetensors"]}.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text('{"steps": 5}')
    assert read_runs(tmp_path).unfinished == [tmp_path / "begun", tmp_path / "empty"]  # a kept model is no run


def test_the_same_run_counts_once(tmp_path: Path) -> None:
    run = some_run()
    write(tmp_path / "a", run[:2])
    shutil.copytree(write(tmp_path / "b", run), tmp_path / "c")
    moved = [{**one, "args": {**one["args"], "output_dir": "/elsewhere", "data_dir": "/data"}} for one in run]
    write(tmp_path / "d", moved)
    records = read_runs(tmp_path, tmp_path / "b")
    assert list(records) == run and records.twice == 3  # the longest of them
    (tmp_path / "b" / "circle").symlink_to(tmp_path)
    assert read_runs(tmp_path).twice == 3
    linked = tmp_path / "links"
    linked.mkdir()
    (linked / "run").symlink_to(tmp_path / "b")
    assert list(read_runs(linked)) == run
    other = [{**one, "hparams": {"lr": 7}} for one in run]
    write(tmp_path / "e", other)
    assert len(read_runs(tmp_path).runs) == 2


def test_a_restarted_run_counts_as_last_recorded(tmp_path: Path) -> None:
    first = [record(step, accuracies([0, 0.9, 0.9], [0.1, 0, 0])) for step in (0, 10, 20)]
    again = [record(step, accuracies([0, 0.5, 0.5 + step / 100], [0.2 + step / 100, 0, 0])) for step in (0, 10)]
    records = read_runs(write(tmp_path, first + again))
    assert len(records) == 5
    rows = [select(records, method)[0] for method in ("training", "oracle")]
    assert [(row["step"], row["accuracy"]) for row in rows] == [(20, 0.1), (20, 0.1)]
    (row,) = select(read_runs(write(tmp_path, [*first, *again, {**again[1], "step": 20}])), "training")
    assert (row["step"], row["accuracy"]) == (10, 0.2 + 0.1)


def our_run(folder: Path, last: int, steps: int = 30, **more: Any) -> Path:
    """A run folder as training writes it."""
    run = some_run(**more)
    for one in run:
        one["args"] |= {"steps": steps, "domains": ["a", "b", "c"], "backbone": "resnet50", "weights": "hub"}
    identity = {"dataset": "PACS", "target": ["a"], **more}
    write(folder, [one for one in run if one["step"] <= last], sort_keys=False)
    (folder / "run.json").write_text(json.dumps({"identity": identity, "steps": steps, "aidgn": "0.1.0"}))
    return folder


def test_unfinished_runs_are_known(tmp_path: Path) -> None:
    our_run(tmp_path / "done", last=30, draw=1)
    half = our_run(tmp_path / "half", last=20, draw=2)
    begun = our_run(tmp_path / "begun", last=30, draw=3)
    (begun / "results.jsonl").unlink()
    write(tmp_path / "domainbed", some_run(draw=4))
    records = read_runs(tmp_path)
    assert sorted(map(str, records.unfinished)) == [str(begun), str(half)]
    assert len(records) == 4 + 3 + 4
    assert {row["args"]["hparams_seed"] for row in records.finished()} == {1, 4}
    assert select(read_runs(half), "training")[0]["target_name"] == "a"
    (half / "run.json").write_text("{")
    with pytest.raises(AidgnError, match=r"half/run\.json"):
        read_runs(tmp_path)


def test_runs_of_ours_are_told_apart_by_their_identity(tmp_path: Path) -> None:
    for name, milestones in (("one", []), ("two", [100]), ("copy", [100])):
        folder = our_run(tmp_path / name, last=30)
        about = json.loads((folder / "run.json").read_text())
        about["identity"]["lr_milestones"] = milestones
        (folder / "run.json").write_text(json.dumps(about))
    records = read_runs(tmp_path)
    assert (len(records.runs), records.twice) == (2, 1)


def test_runs_on_other_images_do_not_compete(tmp_path: Path) -> None:
    """The folder of pictures changed between two runs that are the same otherwise."""
    for name, data, trial in (("before", "one", 0), ("after", "two", 0), ("another trial", "three", 1)):
        folder = our_run(tmp_path / name, last=30, trial=trial)
        about = json.loads((folder / "run.json").read_text())
        about["identity"]["data"] = data
        (folder / "run.json").write_text(json.dumps(about))
    assert len(select(read_runs(tmp_path / "after", tmp_path / "another trial"))) == 2
    with pytest.raises(AidgnError, match=r"after and .*before .*PACS"):
        select(read_runs(tmp_path))


def test_many_files_are_read_by_all_cores_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, run in enumerate(random_sweep(0)):
        write(tmp_path / f"{number:03d}", run)
    alone = read_runs(tmp_path)
    monkeypatch.setattr(aidgn.runs.reader, "CHUNK", 20)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    together = read_runs(tmp_path)
    assert all(run.rest is None for run in together.runs)  # read again where asked for
    assert list(together) == list(alone)
    assert select(together) == select(alone) and len(select(alone)) == 12
    (tmp_path / "077" / "results.jsonl").write_text("{\n{}\n")
    with pytest.raises(AidgnError, match="line 1 "):
        read_runs(tmp_path)
    with pytest.raises(AidgnError, match=r"077/results\.jsonl"):
        list(together)
    shutil.rmtree(tmp_path)
    assert len(select(alone)) == 12  # these were few and are in memory
    with pytest.raises(AidgnError, match=r"results\.jsonl"):
        select(together)


def test_starts_without_torch() -> None:
    code = "import sys, aidgn.selection, aidgn.report.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_records_as_a_list_of_dicts(tmp_path: Path) -> None:
    lines = [record for draw in range(3) for record in some_run(draw=draw)]
    for draw in range(3):
        write(tmp_path / str(draw), some_run(draw=draw))
    records = load_records(tmp_path)
    assert type(records) is list and all(type(record) is dict for record in records)
    assert list(records) == lines
    assert select(records, "training") == select(read_runs(tmp_path), "training")
