"""More models of the `transformers` library: what else users bring."""

from __future__ import annotations

import torch

from benchmarks.models.library import CAUSAL as _CAUSAL
from benchmarks.models.library import LENGTH, WIDTH, WORDS, classes, images, library, masked_text, text, words
from benchmarks.models.library import TEXT as _TEXT
from benchmarks.models.library import VISION as _VISION
from benchmarks.models.model import Batch, Model

_successors = text(labels=words)
_MULTIHEAD = {name: value for name, value in _CAUSAL.items() if name != "num_key_value_heads"}
_SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "use_cache": False,
}  # fmt: skip


def _labelled() -> Batch:
    return {"input_ids": words(), "labels": classes()}


def _spoken() -> Batch:
    return {"input_values": torch.randn(3, 800), "labels": classes()}


FURTHER: tuple[Model, ...] = (
    library("roberta", "RobertaForMaskedLM", "RobertaConfig", masked_text, **_TEXT),
    library("xlm-roberta", "XLMRobertaForSequenceClassification", "XLMRobertaConfig", _labelled, **_TEXT, num_labels=4),
    library(
        "distilbert", "DistilBertForMaskedLM", "DistilBertConfig", masked_text, vocab_size=WORDS, dim=WIDTH, n_layers=2,
        n_heads=4, hidden_dim=64, max_position_embeddings=64,
    ),
    library(
        "deberta", "DebertaForMaskedLM", "DebertaConfig", masked_text, **_TEXT, relative_attention=True,
        pos_att_type=["c2p", "p2c"], max_relative_positions=32,
    ),
    library(
        "deberta-v2", "DebertaV2ForMaskedLM", "DebertaV2Config", masked_text, **_TEXT, relative_attention=True,
        pos_att_type=["c2p", "p2c"], max_relative_positions=32, position_buckets=16,
    ),
    library("electra", "ElectraForPreTraining", "ElectraConfig", lambda: {
        "input_ids": words(), "labels": torch.randint(0, 2, (3, LENGTH))
    }, **_TEXT, embedding_size=16),
    library("albert", "AlbertForMaskedLM", "AlbertConfig", masked_text, **_TEXT, embedding_size=16),
    library("mpnet", "MPNetForMaskedLM", "MPNetConfig", masked_text, **_TEXT),
    library("funnel", "FunnelForMaskedLM", "FunnelConfig", masked_text, vocab_size=WORDS, d_model=WIDTH, n_head=4,
            d_head=8, d_inner=64, block_sizes=[1, 1], num_decoder_layers=1),
    library("fnet", "FNetForMaskedLM", "FNetConfig", _successors, vocab_size=WORDS, hidden_size=WIDTH,
            num_hidden_layers=2, intermediate_size=64, max_position_embeddings=64),
    library("modernbert", "ModernBertForMaskedLM", "ModernBertConfig", masked_text, **_TEXT, local_attention=8,
            cls_token_id=1, sep_token_id=2),
    library("bart", "BartForConditionalGeneration", "BartConfig", _successors, **_SEQ2SEQ),
    library("marian", "MarianMTModel", "MarianConfig", _successors, **_SEQ2SEQ),
    library("pegasus", "PegasusForConditionalGeneration", "PegasusConfig", _successors, **_SEQ2SEQ),
    library("opt", "OPTForCausalLM", "OPTConfig", _successors, **_MULTIHEAD, ffn_dim=64, word_embed_proj_dim=WIDTH),
    library("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", _successors, **_MULTIHEAD),
    library("gpt-neo", "GPTNeoForCausalLM", "GPTNeoConfig", _successors, vocab_size=WORDS, hidden_size=WIDTH,
            num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=4,
            max_position_embeddings=64, use_cache=False, bos_token_id=1, eos_token_id=2),
    library("gptj", "GPTJForCausalLM", "GPTJConfig", _successors, vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=4,
            n_positions=64, rotary_dim=4, use_cache=False, bos_token_id=1, eos_token_id=2),
    library("bloom", "BloomForCausalLM", "BloomConfig", _successors, vocab_size=WORDS, hidden_size=WIDTH, n_layer=2,
            n_head=4, use_cache=False),
    library("falcon", "FalconForCausalLM", "FalconConfig", _successors, **_MULTIHEAD, multi_query=True),
    library("phi", "PhiForCausalLM", "PhiConfig", _successors, **_CAUSAL),
    library("phi3", "Phi3ForCausalLM", "Phi3Config", _successors, **_CAUSAL),
    library("gemma", "GemmaForCausalLM", "GemmaConfig", _successors, **_CAUSAL, head_dim=8),
    library("gemma2", "Gemma2ForCausalLM", "Gemma2Config", _successors, **_CAUSAL, head_dim=8, sliding_window=4),
    library("gemma3", "Gemma3ForCausalLM", "Gemma3TextConfig", _successors, **_CAUSAL, head_dim=8, sliding_window=4),
    library("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _successors, **_CAUSAL),
    library("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _successors, **_CAUSAL, head_dim=8),
    library("qwen2-moe", "Qwen2MoeForCausalLM", "Qwen2MoeConfig", _successors, **_CAUSAL, num_experts=4,
            num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            control_flow="which expert gets which tokens"),
    library("mistral", "MistralForCausalLM", "MistralConfig", _successors, **_CAUSAL, sliding_window=4),
    library("olmo2", "Olmo2ForCausalLM", "Olmo2Config", _successors, **_CAUSAL),
    library("stablelm", "StableLmForCausalLM", "StableLmConfig", _successors, **_CAUSAL),
    library("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", _successors, **_CAUSAL),
    library("cohere", "CohereForCausalLM", "CohereConfig", _successors, **_CAUSAL),
    library("granite", "GraniteForCausalLM", "GraniteConfig", _successors, **_CAUSAL),
    library("rwkv", "RwkvForCausalLM", "RwkvConfig", _successors, vocab_size=WORDS, hidden_size=WIDTH,
            attention_hidden_size=WIDTH, num_hidden_layers=2, intermediate_size=64, context_length=64, use_cache=False),
    library("mamba2", "Mamba2ForCausalLM", "Mamba2Config", _successors, vocab_size=WORDS, hidden_size=WIDTH,
            state_size=4, num_hidden_layers=2, num_heads=8, head_dim=8, n_groups=1, chunk_size=8, use_cache=False,
            pad_token_id=0, bos_token_id=1, eos_token_id=2),
    library("xlnet", "XLNetLMHeadModel", "XLNetConfig", _successors, vocab_size=WORDS, d_model=WIDTH, n_layer=2,
            n_head=4, d_inner=64, use_mems_train=False),
    library("deit", "DeiTForImageClassification", "DeiTConfig", images(32), **_VISION),
    library("beit", "BeitForImageClassification", "BeitConfig", images(32), **_VISION,
            use_relative_position_bias=True),
    library("dinov2", "Dinov2ForImageClassification", "Dinov2Config", images(32), **_VISION, mlp_ratio=2),
    library("convnextv2", "ConvNextV2ForImageClassification", "ConvNextV2Config", images(32),
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], num_labels=4, patch_size=2),
    library("swinv2", "Swinv2ForImageClassification", "Swinv2Config", images(32), image_size=32, patch_size=2,
            embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=4),
    library("mobilenet-v1", "MobileNetV1ForImageClassification", "MobileNetV1Config", images(64), depth_multiplier=0.25,
            num_labels=4),
    library("poolformer", "PoolFormerForImageClassification", "PoolFormerConfig", images(64), num_labels=4,
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1]),
    library("pvt", "PvtForImageClassification", "PvtConfig", images(64), num_labels=4, image_size=64,
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4]),
    library("levit", "LevitForImageClassification", "LevitConfig", images(64), num_labels=4, image_size=64,
            hidden_sizes=[16, 24, 32], num_attention_heads=[2, 3, 4], depths=[1, 1, 1], key_dim=[8, 8, 8]),
    library("regnet", "RegNetForImageClassification", "RegNetConfig", images(64), num_labels=4, embedding_size=8,
            hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], groups_width=8),
    library("perceiver", "PerceiverForSequenceClassification", "PerceiverConfig", lambda: {
        "inputs": words(), "labels": classes()
    }, num_latents=8, d_latents=WIDTH, d_model=WIDTH, num_blocks=1, num_self_attends_per_block=2,
            num_self_attention_heads=4, num_cross_attention_heads=4, vocab_size=WORDS, max_position_embeddings=64,
            num_labels=4, qk_channels=WIDTH, v_channels=WIDTH),
    library("vit-mae", "ViTMAEForPreTraining", "ViTMAEConfig", images(32, noise=lambda: torch.rand(3, 16)),
            **{k: v for k, v in _VISION.items() if k != "num_labels"}, decoder_hidden_size=16,
            decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=32),
    library("dpt", "DPTForSemanticSegmentation", "DPTConfig",
            images(32, labels=lambda: torch.randint(0, 4, (3, 32, 32))), **_VISION | {"num_hidden_layers": 4},
            backbone_out_indices=[0, 1, 2, 3],
            neck_hidden_sizes=[8, 8, 16, 16], fusion_hidden_size=16, is_hybrid=False),
    library("hubert", "HubertForSequenceClassification", "HubertConfig", _spoken, hidden_size=WIDTH,
            num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, conv_dim=[16, 16, 16],
            conv_stride=[5, 2, 2], conv_kernel=[10, 3, 3], num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=4, apply_spec_augment=False, layerdrop=0.0, classifier_proj_size=16,
            num_labels=4),
    library("ast", "ASTForAudioClassification", "ASTConfig", lambda: {
        "input_values": torch.randn(3, 32, 16), "labels": classes()
    }, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, patch_size=8,
            frequency_stride=4, time_stride=4, max_length=32, num_mel_bins=16, num_labels=4),
    library("patchtst", "PatchTSTForPrediction", "PatchTSTConfig", lambda: {
        "past_values": torch.randn(3, 32, 2), "future_values": torch.randn(3, 8, 2)
    }, context_length=32, prediction_length=8, patch_length=8, patch_stride=8, num_input_channels=2, d_model=WIDTH,
            num_hidden_layers=2, num_attention_heads=4, ffn_dim=64),
)  # fmt: skip
"""Not among those of the promise, but of the same kinds."""
