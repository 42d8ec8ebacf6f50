"""Models of timm and torchvision, unmodified and small.

Both stand apart from the environment, in `vision` below it: the registry has torchvision for the CUDA build
of torch alone, and beside the CPU build transformers would stumble over it.
"""

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

APART = Path(sys.prefix) / "vision"
# Without its compiled part torchvision registers shapes for these two operators that it never declared.
UNDECLARED = ("nms", "qnms")


def require_vision() -> None:
    """Skip the test where neither library is installed."""
    if not (APART / "timm").exists():
        pytest.skip("needs timm and torchvision, which `make env` installs")


@cache
def import_timm() -> Any:
    """timm, which brings torchvision."""
    sys.path.append(str(APART))
    try:
        torch.ops.load_library(APART / "torchvision" / "_C.so")
    except OSError:
        declared = torch.library.Library("torchvision", "FRAGMENT")
        for name in UNDECLARED:
            declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    try:
        import timm
    finally:
        sys.path.remove(str(APART))
    return timm


def timm_resnet() -> nn.Module:
    """A ResNet of the second kind, whose batch norms apply the activation as well, in channels_last."""
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.create_model("resnetv2_18", num_classes=5, stem_chs=8, channels=(8, 8, 12, 12))
    return model.to(memory_format=torch.channels_last)


def timm_convnext() -> nn.Module:
    """Depthwise convolutions, layer norm over channels, scales per layer."""
    timm = import_timm()
    torch.manual_seed(0)
    model = timm.create_model(
        "convnext_atto", num_classes=5, depths=(2, 2, 2, 2), dims=(8, 8, 12, 12), output_stride=8
    )
    return model.to(memory_format=torch.channels_last)


def timm_vit() -> nn.Module:
    """A vision transformer with a class token and fused queries, keys and values."""
    timm = import_timm()
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", num_classes=5, img_size=16, patch_size=8, embed_dim=16, depth=3, num_heads=2
    )


def torchvision_resnet() -> nn.Module:
    """A ResNet of one block per stage at its own widths, in channels_last."""
    import_timm()
    from torchvision.models.resnet import BasicBlock, ResNet

    torch.manual_seed(0)
    model = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5)
    return model.to(memory_format=torch.channels_last)


def torchvision_mobilenet() -> nn.Module:
    """Inverted residuals: depthwise convolutions between two narrow ends, in channels_last."""
    import_timm()
    from torchvision.models import MobileNetV2

    torch.manual_seed(0)
    settings = [[1, 8, 1, 1], [2, 12, 2, 2], [2, 16, 2, 2]]
    model = MobileNetV2(
        num_classes=5, width_mult=0.25, round_nearest=4, inverted_residual_setting=settings, dropout=0.0
    )
    return model.to(memory_format=torch.channels_last)
