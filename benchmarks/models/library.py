"""Models of the `transformers` library with random weights, from small configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models.model import Batch, Model

WIDTH, WORDS, LENGTH = 32, 96, 16


def words(batch: int = 3, length: int = LENGTH) -> Tensor:
    """Random tokens, none of them one of the first three, which configurations take as special ones."""
    return torch.randint(3, WORDS, (batch, length))


def text(**more: Callable[[], Any]) -> Callable[[], Batch]:
    """Tokens, with what else the model takes."""
    return lambda: {"input_ids": words()} | {name: make() for name, make in more.items()}


def masked_text() -> Batch:
    """Tokens, of which the last ones of some sequences are masked, and the tokens to be predicted."""
    tokens = words()
    mask = torch.ones_like(tokens)
    mask[1, -4:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": words()}


def classes(count: int = 4, batch: int = 3) -> Tensor:
    """Random classes."""
    return torch.randint(0, count, (batch,))


def images(size: int, **more: Callable[[], Any]) -> Callable[[], Batch]:
    """Random images, and classes where nothing else is asked for."""
    given = more or {"labels": classes}
    return lambda: {"pixel_values": torch.randn(3, 3, size, size)} | {name: make() for name, make in given.items()}


def library(
    name: str,
    model: str,
    config: str,
    batch: Callable[[], Batch],
    *,
    control_flow: str = "",
    loss: Callable[[Any], Tensor] | None = None,
    rate: float = 1e-2,
    **options: Any,
) -> Model:
    """The row of a class of the library; imported on demand, since that takes seconds."""

    def made() -> nn.Module:
        import transformers

        transformers.logging.set_verbosity_error()
        built = getattr(transformers, config)(**options)
        if hasattr(built, "initializer_range"):
            built.initializer_range = 0.1  # the usual 0.02 leaves small models almost constant
        result: nn.Module = getattr(transformers, model)(built)
        return result

    return Model(name, made, batch, loss, control_flow, rate)


TEXT: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAUSAL = TEXT | {"num_key_value_heads": 2, "use_cache": False}
VISION: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 4,
}
_answers = text(start_positions=lambda: classes(LENGTH), end_positions=lambda: classes(LENGTH))
_successors = text(labels=words)


def _boxes(result: Any) -> Tensor:
    """In place of DETR's own loss, which assigns boxes to objects in NumPy."""
    return result.logits.logsumexp(-1).mean() + result.pred_boxes.square().sum(-1).mean()


_BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def _detr() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    backbone = transformers.ResNetConfig(**_BACKBONE, out_features=["stage2"])
    config = transformers.DetrConfig(
        backbone_config=backbone,
        use_timm_backbone=False,
        num_queries=5,
        d_model=WIDTH,
        encoder_layers=1,
        decoder_layers=1,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_labels=4,
    )
    return transformers.DetrForObjectDetection(config)


def _clip() -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    vision = {k: v for k, v in VISION.items() if k != "num_labels"}
    config = transformers.CLIPConfig(
        text_config=TEXT | {"initializer_range": 0.1},
        vision_config=vision | {"initializer_range": 0.1},
        projection_dim=16,
    )
    return transformers.CLIPModel(config)


NAMED: tuple[Model, ...] = (
    library("bert-mlm", "BertForMaskedLM", "BertConfig", masked_text, **TEXT),
    library("bert-qa", "BertForQuestionAnswering", "BertConfig", _answers, **TEXT),
    library(
        "gpt2",
        "GPT2LMHeadModel",
        "GPT2Config",
        _successors,
        vocab_size=WORDS,
        n_positions=64,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    library("llama", "LlamaForCausalLM", "LlamaConfig", _successors, **CAUSAL),
    library(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        _successors,
        **CAUSAL,
        num_local_experts=4,
        control_flow="which expert gets which tokens",
    ),
    library(
        "t5",
        "T5ForConditionalGeneration",
        "T5Config",
        text(labels=words),
        vocab_size=WORDS,
        d_model=WIDTH,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    library("vit", "ViTForImageClassification", "ViTConfig", images(32), **VISION),
    library(
        "swin",
        "SwinForImageClassification",
        "SwinConfig",
        images(32),
        image_size=32,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=4,
    ),
    library(
        "convnext",
        "ConvNextForImageClassification",
        "ConvNextConfig",
        images(32),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 2, 1],
        layer_scale_init_value=0.5,
        num_labels=4,
        patch_size=2,
    ),
    library(
        "resnet",
        "ResNetForImageClassification",
        "ResNetConfig",
        images(64),
        embedding_size=8,
        hidden_sizes=[16, 32, 48],
        depths=[1, 2, 1],
        num_labels=4,
    ),
    library(
        "efficientnet",
        "EfficientNetForImageClassification",
        "EfficientNetConfig",
        images(64),
        width_coefficient=0.25,
        depth_coefficient=0.5,
        hidden_dim=320,
        num_labels=4,
    ),
    library(
        "mobilenet-v2",
        "MobileNetV2ForImageClassification",
        "MobileNetV2Config",
        images(64),
        depth_multiplier=0.25,
        num_labels=4,
    ),
    library(
        "mobilevit",
        "MobileViTForImageClassification",
        "MobileViTConfig",
        images(64),
        image_size=64,
        hidden_sizes=[16, 24, 32],
        neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
        num_labels=4,
    ),
    library(
        "segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        images(32, labels=lambda: torch.randint(0, 4, (3, 32, 32))),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        num_labels=4,
    ),
    library(
        "whisper",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        lambda: {"input_features": torch.randn(3, 8, 32), "labels": words()},
        vocab_size=WORDS,
        num_mel_bins=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        d_model=WIDTH,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    ),
    Model("clip", _clip, images(32, input_ids=words, return_loss=lambda: True)),
    library(
        "mamba",
        "MambaForCausalLM",
        "MambaConfig",
        _successors,
        vocab_size=WORDS,
        hidden_size=WIDTH,
        state_size=4,
        num_hidden_layers=2,
        time_step_rank=4,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    ),
    library(
        "wav2vec2",
        "Wav2Vec2ForSequenceClassification",
        "Wav2Vec2Config",
        lambda: {"input_values": torch.randn(3, 800), "labels": classes()},
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=[16, 16, 16],
        conv_stride=[5, 2, 2],
        conv_kernel=[10, 3, 3],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        layerdrop=0.0,
        classifier_proj_size=16,
        num_labels=4,
    ),
    Model("detr", _detr, images(64, pixel_mask=lambda: torch.ones(3, 64, 64, dtype=torch.long)), _boxes),
)
"""The models that `make conformance-models` promises."""
