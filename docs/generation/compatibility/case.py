"""One row of the compatibility matrix: a model's real class in a tiny size, inputs for it, and its preprocessing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import buttress as bt

VOCABULARY = 64
IMAGE_TOKEN = 4
IMAGE_SIZE = 32
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT, IMAGES, AUDIO = "text", "images", "audio"
PLAN = bt.BTT(rank=2)


@dataclass(frozen=True)
class Case:
    """An architecture, how to build it and what to feed it.

    Attributes:
        label: Name of the row.
        library: "transformers", "timm" or "torchvision".
        build: Builds the model, with at least two layers.
        inputs: Keyword arguments of its forward pass; the key "" is the one positional argument.
        modalities: Kinds of data that reach all of its layers.
        model_args: Arguments of `timm.create_model`, which timm does not store.
        preprocessors: Build what the model's folder needs besides the weights, such as a tokenizer.
        plan: What `replace_` is given.
    """

    label: str
    library: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    modalities: tuple[str, ...]
    model_args: dict[str, Any] = field(default_factory=dict)
    preprocessors: tuple[Callable[[], Any], ...] = ()
    plan: Any = PLAN


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) % (VOCABULARY - 8) + 8
    return {"input_ids": ids}


def encoder_and_decoder_tokens() -> dict[str, Tensor]:
    return tokens() | {"decoder_input_ids": tokens()["input_ids"][:, :6]}


def pixels(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))


def images() -> dict[str, Tensor]:
    return {"pixel_values": pixels(IMAGE_SIZE)}


def tokens_and_images() -> dict[str, Tensor]:
    return tokens() | images()


def tokens_around_images() -> dict[str, Tensor]:
    """Inputs in which each image stands for the tokens of its patches, 4 by 4."""
    ids = tokens()["input_ids"]
    patches = torch.full((2, 16), IMAGE_TOKEN)
    return {"input_ids": torch.cat([ids[:, :4], patches, ids[:, 4:]], dim=1)} | images()


def tokens_around_patches() -> dict[str, Tensor]:
    """The same with the flat patches of Qwen2-VL, four of which are merged into one token."""
    ids = tokens()["input_ids"]
    merged = torch.full((2, 4), IMAGE_TOKEN)
    patches = torch.randn(2 * 16, 3 * 2 * 8 * 8, generator=torch.Generator().manual_seed(0))
    ids = torch.cat([ids[:, :4], merged, ids[:, 4:]], dim=1)
    return {
        "input_ids": ids,
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
        "pixel_values": patches,
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


def spectrograms() -> dict[str, Tensor]:
    features = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"][:, :6]}


def waveforms() -> dict[str, Tensor]:
    return {"input_values": torch.randn(2, 400, generator=torch.Generator().manual_seed(0))}


def tokenizer(image_token: str = "<image>") -> Any:
    """One token per word."""
    import tokenizers
    import transformers

    words = ["<pad>", "<s>", "</s>", "<unk>", image_token, "<mask>", *(f"w{i}" for i in range(6, VOCABULARY))]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    fast = tokenizers.Tokenizer(model)
    fast.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        mask_token="<mask>", additional_special_tokens=[image_token], model_max_length=32,
    )  # fmt: skip


def image_processor() -> Any:
    import transformers

    return transformers.ViTImageProcessor(size={"height": IMAGE_SIZE, "width": IMAGE_SIZE})


def llava_processor() -> Any:
    import transformers

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = transformers.CLIPImageProcessor(size={"shortest_edge": IMAGE_SIZE}, crop_size=size)
    return transformers.LlavaProcessor(
        images, tokenizer(), patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def qwen2_vl_processor() -> Any:
    import transformers

    sizes = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2}
    pixels_of_an_image = {"shortest_edge": IMAGE_SIZE**2, "longest_edge": IMAGE_SIZE**2}
    images = transformers.Qwen2VLImageProcessor(**sizes, size=pixels_of_an_image)
    videos = transformers.Qwen2VLVideoProcessor(**sizes, size=pixels_of_an_image)
    return transformers.Qwen2VLProcessor(images, tokenizer("<|image_pad|>"), videos)
