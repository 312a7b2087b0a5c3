"""Training the last stage and the classifier alone: nothing else changes, nothing is kept of what comes before."""

import pytest
import torch
from safetensors.torch import save_file

from aidgn import backbones
from aidgn.algorithms import find
from aidgn.data import load_dataset
from aidgn.errors import AidgnError
from aidgn.training import RunSpec
from aidgn.training.featurizer import create_featurizer


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_file(backbones.create("test_resnet", weights="none", freeze_bn=False).state_dict(), path)
    return str(path)


def kept_and_changed(weights: str, train_only: str | None) -> tuple[int, set[str]]:
    """Numbers kept for the backward pass of one update, and the parts of the network that it changed."""
    torch.manual_seed(0)
    module = create_featurizer("test_resnet", weights, 3, "float32", torch.device("cpu"), train_only)
    algorithm = find("AIDGN")(module, 2, 1)
    algorithm.train()
    before = {name: value.clone() for name, value in module.network.state_dict().items()}
    kept = 0

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        algorithm.update([(torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 0, 1]))])
    changed = {
        name.split(".")[0]
        for name, value in module.network.state_dict().items()
        if not torch.equal(value, before[name])
    }
    return kept, changed


def test_only_the_last_stage_changes_and_is_kept(weights: str) -> None:
    everything, all_parts = kept_and_changed(weights, None)
    part, changed = kept_and_changed(weights, "last-stage")
    assert {"conv1", "layer1", "layer4"} <= all_parts and changed == {"layer4"}
    assert part < 0.5 * everything


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("resnet18", "layer4.0.conv1.weight"),
        ("torchvision/resnet18", "layer4.0.conv1.weight"),
        ("vit_tiny_patch16_224", "blocks.11.norm1.weight"),
        ("mobilenetv3_small_100", "blocks.5.0.conv.weight"),
    ],
)
def test_where_the_last_stage_begins(name: str, first: str) -> None:
    net = backbones.create(name, weights="none")
    backbones.train_last_stage(net)
    assert next(key for key, parameter in net.named_parameters() if parameter.requires_grad) == first
    trained = [parameter.requires_grad for parameter in net.parameters()]
    assert trained == sorted(trained)  # all that follows trains


def test_a_run_is_called_what_it_was_called_before(weights: str) -> None:
    digits = load_dataset("digits")
    plain = RunSpec("digits", "ERM", "ink", backbone="test_resnet", weights=weights).resolved(digits)
    part = RunSpec("digits", "ERM", "ink", backbone="test_resnet", weights=weights, train_only="last-stage").resolved(
        digits
    )
    assert "train_only" not in plain.identity(digits, "x")
    assert part.identity(digits, "x") == {**plain.identity(digits, "x"), "train_only": "last-stage"}
    with pytest.raises(AidgnError, match="weights is none"):
        RunSpec("digits", "ERM", "ink", train_only="last-stage").resolved(digits)
    with pytest.raises(AidgnError, match="expected all or last-stage or head"):
        RunSpec("digits", "ERM", "ink", backbone="test_resnet", weights=weights, train_only="stage").resolved(digits)
    everything = RunSpec("digits", "ERM", "ink", backbone="test_resnet", weights=weights, train_only="all")
    assert everything.resolved(digits).key() == plain.key()
