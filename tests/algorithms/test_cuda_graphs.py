"""On a GPU the network is compiled into CUDA graphs, whose memory the next pass overwrites: every algorithm's updates
must be those of the plain network, also where an update has several passes."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from aidgn import backbones
from aidgn.algorithms import ALGORITHMS, create
from aidgn.training.featurizer import choose_precision, featurizer

BACKBONE, CLASSES, SIZE = "resnet18.tv_in1k", 4, 64
SOON = {"IRM": {"irm_penalty_anneal_iters": 3}, "VREx": {"vrex_penalty_anneal_iters": 3},
        "Fishr": {"penalty_anneal_iters": 3}, "EQRM": {"eqrm_burnin_iters": 3, "eqrm_lr": 1e-3}}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of any network, for with weights batch norm is frozen and folded."""
    path = tmp_path_factory.mktemp("weights") / "random.safetensors"
    torch.manual_seed(0)
    save_file(backbones.create(BACKBONE, weights="none").state_dict(), path)
    return path


def same_updates(name: str, weights: Path, device: torch.device) -> None:
    kind, precision = ALGORITHMS[name], choose_precision("float32", device)
    network = featurizer(BACKBONE, weights, 3 + kind.extra_channels, precision, device)
    torch.manual_seed(1)
    graphs = create(name, network, CLASSES, 3, **SOON.get(name, {})).to(device).train()
    plain = copy.deepcopy(graphs)  # whose network is not compiled
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        batch = [(torch.randn(8, 3, SIZE, SIZE, generator=generator).to(device) + 0.3 * domain,
                  torch.randint(CLASSES, (8,), generator=generator).to(device)) for domain in range(3)]
        terms = []
        for algorithm in (graphs, plain):
            torch.manual_seed(step)
            np.random.seed(step)
            if device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            terms.append(algorithm.update(batch))
        torch.testing.assert_close(*terms, rtol=1e-3, atol=1e-4)
        for key, optimizer in plain.optimizers.items():
            ours, theirs = (torch.cat([state["exp_avg"].flatten() for state in each.state.values()] or [torch.zeros(1)])
                            for each in (graphs.optimizers[key], optimizer))
            assert (ours - theirs).norm() <= 0.01 * theirs.norm(), (key, step)
        graphs.load_training_state(copy.deepcopy(plain.training_state()))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_updates_are_those_of_the_plain_network(name: str, weights: Path) -> None:
    same_updates(name, weights, torch.device("cuda"))
