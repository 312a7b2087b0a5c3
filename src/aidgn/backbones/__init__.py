"""Networks that turn images into features: timm, torchvision and a small one."""

from aidgn.backbones.feature_norm import feature_norm
from aidgn.backbones.folding import fold, freeze_folded, unfold, unfuse
from aidgn.backbones.frozen_bn import FrozenBatchNorm, freeze
from aidgn.backbones.fused_resnet import FoldedConv2d, has_kernels, stem_convolution
from aidgn.backbones.preprocessing import IMAGENET, Preprocessing
from aidgn.backbones.registry import (
    DEFAULT,
    TORCHVISION,
    check_name,
    create,
    freezes_batch_norm,
    list_backbones,
    preprocessing,
    train_last_stage,
)
from aidgn.backbones.small import SMALL, SmallConvNet
from aidgn.backbones.trial import choose_image_size, try_forward
from aidgn.backbones.weights import (
    WeightsError,
    find_mismatch,
    is_stride_first,
    set_stride_first,
    summarize,
    weights_identity,
)
