"""The benchmark that chooses recipes: scores against loops over synthetic records, and runs that are interrupted."""

import json
import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from aidgn.runs.folder import RunFolder
from aidgn.training import RunSpec, trainer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DOMAINS = ["art_painting", "cartoon", "photo", "sketch"]
PAIRS = list(combinations(range(4), 2))


@pytest.fixture
def recipes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(trainer, "Trainer", trainer.Trainer)  # the benchmark puts its own there
    import recipes

    return recipes


def write_run(root: Path, algorithm: str, lr: float, pair: tuple[int, int], records: list[dict[str, float]]) -> None:
    folder = root / f"{algorithm}-{lr}-{pair[0]}{pair[1]}"
    folder.mkdir(parents=True)
    args = {"dataset": "PACS", "algorithm": algorithm, "test_envs": pair, "trial_seed": 0, "hparams_seed": 0}
    args |= {"domains": DOMAINS, "steps": 20}
    lines = [{"args": args, "hparams": {"lr": lr}, **record} for record in records]
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    identity = {**{"dataset": "PACS", "algorithm": algorithm, "target": [DOMAINS[i] for i in pair]}, "trial": 0}
    identity |= {"draw": 0, "steps": 20, "weights": "hub", "average": "sma" if "SMA" in algorithm else None}
    identity["hyper_parameters"] = {"lr": lr}
    (folder / "run.json").write_text(json.dumps({"identity": identity, "steps": 20}))


def random_records(rng: random.Random, pair: tuple[int, int]) -> list[dict[str, float]]:
    return [
        {"step": step}
        | {f"env{i}_out_acc": rng.random() for i in range(4)}
        | {f"env{i}_in_acc": rng.random() for i in pair}
        for step in (10, 20)
    ]


def test_scores_and_choices(recipes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = random.Random(0)
    runs = {
        (algorithm, lr): {pair: random_records(rng, pair) for pair in PAIRS}
        for algorithm in ("ERM", "ERM+SMA")
        for lr in (1e-4, 1e-3)
    }
    for (algorithm, lr), by_pair in runs.items():
        for pair, records in by_pair.items():
            write_run(tmp_path / "runs", algorithm, lr, pair, records)
    write_run(tmp_path / "runs", "ERM", 1e-2, (0, 1), random_records(rng, (0, 1)))  # five runs are missing
    recipes.choose([tmp_path / "runs"], "selected", tmp_path / "plan.yaml", "file.safetensors", 2)

    scores: dict[tuple[str, float], list[float]] = {}
    for configuration, by_pair in runs.items():
        scores[configuration] = []
        for target in range(4):
            others = []
            for other in set(range(4)) - {target}:
                pair = (min(target, other), max(target, other))
                sources = [i for i in range(4) if i not in pair]
                best = max(by_pair[pair], key=lambda record: sum(record[f"env{i}_out_acc"] for i in sources))
                others.append(best[f"env{other}_in_acc"])
            scores[configuration].append(sum(others) / 3)
    printed = {
        line.split("|")[1].strip(): line.split("|")[2:-1]
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    }
    chosen: dict[tuple[str, float], list[str]] = {}
    for target in range(4):
        best = max(scores, key=lambda configuration: scores[configuration][target])
        chosen.setdefault(best, []).append(DOMAINS[target])
    for (algorithm, lr), row in scores.items():
        stars = ["**" if DOMAINS[t] in chosen.get((algorithm, lr), []) else "" for t in range(4)]
        expected = [f"{star}{100 * score:.1f}{star}" for star, score in zip(stars, row, strict=True)]
        assert [cell.strip() for cell in printed[f"{algorithm}: lr {lr}"]] == expected
    assert [cell.strip() for cell in printed["ERM: lr 0.01"]] == ["X"] * 4
    plans = yaml.safe_load((tmp_path / "plan.yaml").read_text())
    assert (
        len(chosen) > 1
        and {
            ("ERM+SMA" if "average" in plan else "ERM", plan["hyper_parameters"]["lr"]): plan["targets"]
            for plan in plans
        }
        == chosen
    )
    assert {(plan["weights"], plan["trials"]) for plan in plans} == {("file.safetensors", 2)}


def test_unequal_budgets_and_missing_weights_are_told(
    recipes: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(2)
    for algorithm, lr in (("ERM", 1e-3), ("AIDGN", 1e-3), ("AIDGN", 1e-2)):
        for pair in PAIRS:
            write_run(tmp_path / algorithm / str(lr), algorithm, lr, pair, random_records(rng, pair))
    recipes.choose([tmp_path / "AIDGN" / "0.001", tmp_path / "ERM"], "last", tmp_path / "plan.yaml", None, 1)
    assert "Unequal" not in capsys.readouterr().out
    recipes.choose([tmp_path], "last", None, None, 1)
    assert "**Unequal budgets**: the choices are from AIDGN 2, ERM 1" in capsys.readouterr().out
    for file in tmp_path.rglob("run.json"):
        file.write_text(file.read_text().replace('"hub"', '"resnet50-1a2b3c4d"'))
    with pytest.raises(SystemExit, match="resnet50-1a2b3c4d"):  # a plan needs the file, which runs do not name
        recipes.choose([tmp_path], "last", tmp_path / "plan.yaml", None, 1)
    recipes.choose([tmp_path], "last", tmp_path / "plan.yaml", "resnet50.safetensors", 1)
    assert yaml.safe_load((tmp_path / "plan.yaml").read_text())[0]["weights"] == "resnet50.safetensors"


def test_plans_name_the_folder_of_own_images(recipes: Any, tmp_path: Path) -> None:
    rng = random.Random(4)
    for pair in PAIRS:
        write_run(tmp_path / "runs", "ERM", 1e-3, pair, random_records(rng, pair))
    for file in tmp_path.rglob("run.json"):
        metadata = json.loads(file.read_text())
        metadata["identity"]["dataset"] = "shops"
        file.write_text(json.dumps({**metadata, "root": "/pictures/shops"}))
    for file in tmp_path.rglob("results.jsonl"):
        file.write_text(file.read_text().replace('"PACS"', '"shops"'))
    recipes.choose([tmp_path / "runs"], "last", tmp_path / "plan.yaml", None, 1)
    assert [plan["datasets"] for plan in yaml.safe_load((tmp_path / "plan.yaml").read_text())] == [["/pictures/shops"]]


@pytest.mark.parametrize("step", ["selected", "last", "second-half"])
def test_nothing_of_the_target_changes_its_choice(recipes: Any, tmp_path: Path, step: str) -> None:
    """Records of the target that say the opposite leave the plan for it as it is, and change plans for others."""
    rng = random.Random(3)
    made = {(lr, pair): random_records(rng, pair) for lr in (1e-4, 1e-3, 1e-2) for pair in PAIRS}
    plans = []
    for target in (None, *range(4)):
        root = tmp_path / str(target)
        for (lr, pair), records in made.items():
            changed = [
                {key: rng.random() if key.startswith(f"env{target}_") else value for key, value in record.items()}
                for record in records
            ]
            write_run(root, "ERM", lr, pair, changed)
        recipes.choose([root], step, root / "plan.yaml", None, 1)
        entries = yaml.safe_load((root / "plan.yaml").read_text())
        plans.append({name: plan["hyper_parameters"]["lr"] for plan in entries for name in plan["targets"]})
    original, *others = plans
    for target, plan in enumerate(others):
        assert plan[DOMAINS[target]] == original[DOMAINS[target]]
    assert any(plan != original for plan in others)


def test_labels_of_the_target_do_not_count(recipes: Any, tmp_path: Path) -> None:
    rng = random.Random(1)
    for copy in ("one", "other"):
        for pair in PAIRS:
            records = random_records(random.Random(str(pair)), pair)
            if copy == "other" and 2 in pair:
                for record in records:
                    record["env2_in_acc"] = rng.random()
                    record["env2_out_acc"] = rng.random()
            write_run(tmp_path / copy, "ERM", 1e-3, pair, records)
    (one,), (other,) = (
        recipes.configurations(recipes.read_runs(tmp_path / copy).runs, "last") for copy in ("one", "other")
    )
    assert one.score(2, 4) == other.score(2, 4)
    assert one.score(1, 4) != other.score(1, 4)


def test_interrupted_run_has_the_same_averages(recipes: Any, tmp_path: Path) -> None:
    recipes.measure_averages()
    spec = RunSpec(
        "digits", "AIDGN", ("ink", "chalk"), steps=6, eval_every=2, warm_start=1, hyper_parameters={"batch_size": 4}
    )

    def stop(what: str, done: int, *_: Any) -> None:
        if what == "train" and done == 3:
            raise KeyboardInterrupt

    trainer.train(spec, tmp_path / "whole", device="cpu")
    with pytest.raises(KeyboardInterrupt):
        trainer.train(spec, tmp_path / "cut", device="cpu", save_seconds=0.0, on_progress=stop)
    trainer.train(spec, tmp_path / "cut", device="cpu")

    def records(root: Path) -> dict[str, list[dict[str, Any]]]:
        return {
            folder.name: [
                {key: value for key, value in record.items() if not key.endswith("_time")}
                for record in RunFolder(folder).records
            ]
            for folder in root.glob("digits-*")
        }

    assert records(tmp_path / "whole") == records(tmp_path / "cut")
    assert len(records(tmp_path / "cut")) == 2


def test_a_plan_becomes_pairs_or_singles(recipes: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("{datasets: digits, algorithms: [ERM], trials: 1, steps: 5, hyper_parameters: {lr: [0.1, 0.2]}}")
    pairs = recipes.expand(plan, None, False)
    assert len(pairs) == 18 and all(len(spec.target) == 2 for spec in pairs)
    singles = recipes.expand(plan, None, True)
    assert len(singles) == 12 and all(len(spec.target) == 1 for spec in singles)
