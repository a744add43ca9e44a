"""Models of transformers, timm and torchvision that read images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from .case import IMAGE_SIZE, IMAGES, PLAN, Case, image_processor, images, pixels
from .language_models import TOWER, model_of

CLASSES = 8
PATCHES = {"img_size": IMAGE_SIZE, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}


def hf(label: str, cls: str, **config: Any) -> Case:
    """Return the row of a transformers model."""
    build = lambda: model_of(cls, config | {"num_labels": CLASSES})  # noqa: E731
    return Case(f"{label} (transformers)", "transformers", build, images, (IMAGES,), preprocessors=(image_processor,))


def timm(label: str, name: str, **model_args: Any) -> Case:
    """Return the row of a timm model."""

    def build() -> nn.Module:
        import timm

        model = timm.create_model(name, num_classes=CLASSES, **model_args)
        nn.init.normal_(model.get_classifier().weight, std=0.1)  # behind a head at zero no layer has any effect
        model.pretrained_cfg["input_size"] = (3, size, size)
        return model

    size = model_args.get("img_size", IMAGE_SIZE)
    return Case(f"{label} (timm)", "timm", build, lambda: {"": pixels(size)}, (IMAGES,), model_args)


def torchvision(label: str, build: Callable[[], nn.Module]) -> Case:
    """Return the row of a torchvision model."""
    return Case(f"{label} (torchvision)", "torchvision", build, lambda: {"": pixels(IMAGE_SIZE)}, (IMAGES,))


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    sizes = {"image_size": IMAGE_SIZE, "patch_size": 8, "num_layers": 2, "num_heads": 4}
    return VisionTransformer(**sizes, hidden_dim=32, mlp_dim=64, num_classes=CLASSES)


def torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer(
        patch_size=[4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=CLASSES
    )


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=CLASSES, width_per_group=8)


def by_name(case: Case, *globs: str) -> Case:
    """Return the row of the same model with a plan that names its 1 × 1 convolutions."""
    return replace(case, label=f"{case.label}, 1 × 1 convolutions by name", plan=dict.fromkeys(globs, PLAN))


TIMM_CONVNEXT = timm("ConvNeXt", "convnext_atto", depths=(1, 1, 1, 1), dims=(16, 16, 32, 32))
TORCHVISION_RESNET = torchvision("ResNet", torchvision_resnet)

CASES = (
    hf("ViT", "ViTForImageClassification", **TOWER),
    hf("DINOv2", "Dinov2ForImageClassification", **TOWER, mlp_ratio=2),
    hf(
        "Swin", "SwinForImageClassification", image_size=IMAGE_SIZE, patch_size=4, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4,
    ),
    hf(
        "Segformer", "SegformerForImageClassification", num_encoder_blocks=2, depths=[2, 2], sr_ratios=[2, 1],
        hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], num_attention_heads=[2, 4], mlp_ratios=[2, 2],
        decoder_hidden_size=32,
    ),
    hf("ConvNeXt", "ConvNextForImageClassification", hidden_sizes=[16, 32], depths=[2, 2], num_stages=2),
    timm("ViT", "vit_tiny_patch16_224", **PATCHES),
    timm(
        "Swin", "swin_tiny_patch4_window7_224", img_size=IMAGE_SIZE, embed_dim=16, depths=(2, 2), num_heads=(2, 4),
        window_size=4,
    ),
    TIMM_CONVNEXT,
    by_name(TIMM_CONVNEXT, "*.mlp.fc1", "*.mlp.fc2"),
    timm("MobileNetV3", "mobilenetv3_small_050"),
    timm("MLP-Mixer", "mixer_s32_224", img_size=64, mlp_ratio=(1 / 32, 1 / 8)),
    timm("EVA-02", "eva02_tiny_patch14_224", **PATCHES),
    timm("BEiT", "beit_base_patch16_224", **PATCHES),
    torchvision("ViT", torchvision_vit),
    torchvision("Swin", torchvision_swin),
    TORCHVISION_RESNET,
    by_name(TORCHVISION_RESNET, "layer*.*.conv1", "layer*.*.conv3", "layer*.*.downsample.0"),
)  # fmt: skip
