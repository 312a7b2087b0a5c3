"""Networks that turn images into features: timm, torchvision and a small one."""

from aidgn.backbones.registry import *  # noqa: F403
