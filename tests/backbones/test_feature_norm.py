"""Whether the last norm layer of a network fixes the norm of its features."""

import pytest
import torch

from aidgn.backbones import create, feature_norm


@pytest.mark.parametrize(
    ("name", "size", "kind"),
    [
        ("test_vit", 64, "fixed"),
        ("convnext_atto", 64, "fixed"),
        ("swin_tiny_patch4_window7_224", 64, "averaged"),
        ("deit_tiny_distilled_patch16_224", 64, "averaged"),
        ("mobilenetv3_small_050", 64, "free"),
        ("small", 28, "free"),
    ],
)
def test_what_the_norms_of_features_do(name: str, size: int, kind: str) -> None:
    state = torch.random.get_rng_state()
    assert feature_norm(name, size) == kind
    assert torch.equal(state, torch.random.get_rng_state())
    if name == "small":
        return
    torch.manual_seed(0)
    with torch.no_grad():
        norms = create(name, weights="none", image_size=size).eval()(20 * torch.randn(8, 3, size, size)).norm(dim=1)
    spread = float((norms.max() - norms.min()) / norms.mean())
    assert (spread < 1e-3) == (kind == "fixed")
