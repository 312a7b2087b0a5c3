"""On a GPU the passes of a network are CUDA graphs, whose memory the next pass overwrites: every algorithm's updates
must be those of the plain network, also where an update has several passes.

In float32 the network is compiled, in bfloat16 its kernels are recorded."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, create
from aidgn.devices import begin_pass, choose_precision
from aidgn.training.featurizer import create_featurizer

BACKBONE = "resnet18.tv_in1k"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of any network, for with weights batch norm is frozen and folded."""
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    torch.manual_seed(0)
    save_file(backbones.create(BACKBONE, weights="none").state_dict(), path)
    return path


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("warm_start", [0, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_those_of_the_plain_network(
    toy: SimpleNamespace, name: str, warm_start: int, precision: str, weights: Path
) -> None:
    device = torch.device("cuda")
    network = create_featurizer(
        BACKBONE, weights, 3 + ALGORITHMS[name].extra_channels, choose_precision(precision, device), device
    )
    torch.manual_seed(1)
    graphs = create(name, network, toy.CLASSES, 3, **toy.BUSY.get(name, {})).to(device).train()
    plain = copy.deepcopy(graphs)  # whose network is neither compiled nor recorded
    loose = 10 if precision == "bfloat16" else 1
    for step in range(6):  # the third and later ones replay
        batch = [(x.to(device, torch.float32), y.to(device)) for x, y in toy.batches(step, (8, 8, 8), (3, 64, 64))]
        terms = []
        for algorithm in (graphs, plain):
            algorithm.featurizer.frozen = step < warm_start
            toy.seed(step)
            begin_pass()
            terms.append(algorithm.update(batch))
        torch.testing.assert_close(*terms, rtol=loose * 1e-3, atol=loose * 1e-4)
        for key in plain.optimizers:
            ours, theirs = (
                torch.cat(
                    [
                        torch.zeros(1, device=device),
                        *(state["exp_avg"].flatten() for state in algorithm.optimizers[key].state.values()),
                    ]
                )
                for algorithm in (graphs, plain)
            )
            assert (ours - theirs).norm() <= loose * 0.01 * theirs.norm(), (key, step)
        graphs.load_training_state(copy.deepcopy(plain.training_state()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_recorded_evaluation_follows_the_weights(toy: SimpleNamespace, weights: Path) -> None:
    device = torch.device("cuda")
    network = create_featurizer(BACKBONE, weights, 3, choose_precision("bfloat16", device), device)
    recorded = create("ERM", network, toy.CLASSES, 3).to(device)
    plain = copy.deepcopy(recorded)
    x = torch.randn(600, 3, 64, 64, device=device)  # two passes, the second with empty places
    seen = []
    for step in range(3):
        features = []
        for algorithm in (recorded, plain):
            algorithm.eval()
            with torch.no_grad():
                features.append(algorithm.featurizer(x))
            algorithm.train()
        torch.testing.assert_close(*features, rtol=0.05, atol=0.02 * features[1].abs().max().item())
        seen.append(features[0])
        begin_pass()
        recorded.update(
            [(a.to(device, torch.float32), b.to(device)) for a, b in toy.batches(step, (8,) * 3, (3, 64, 64))]
        )
        plain.load_training_state(copy.deepcopy(recorded.training_state()))
    assert not torch.equal(seen[0], seen[2])
