"""Tiny random vision-language models with real pixel inputs.

A projector beside the tower (LLaVA), inside it (Qwen3-VL), and cross-attention in place of image tokens (Mllama).
"""

from __future__ import annotations

from typing import Any

IMAGE_TOKEN = 5
TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
CLIP: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "projection_dim": 16,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
MLLAMA: dict[str, Any] = TEXT | {
    "num_hidden_layers": 3,
    "cross_attention_layers": [1],
    "hidden_act": "silu",
    "bos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
MLLAMA_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 1,
    "vision_output_dim": 32,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
}
UNUSED: dict[str, tuple[str, ...]] = {
    "llava": ("model.vision_tower.encoder.layers.2.", "model.vision_tower.post_layernorm."),
    "qwen3_vl": (),
    "mllama": (),
}
"""What the loss does not reach: LLaVA takes the features of the last layer but one."""


def model(kind: str = "llava", seed: int = 0) -> Any:
    """Return a model of about 30,000 parameters in fp32: ``llava``, ``qwen3_vl`` or ``mllama``."""
    import torch
    import transformers

    torch.manual_seed(seed)
    if kind == "llava":
        text = {"model_type": "llama", **TEXT}
        config = transformers.LlavaConfig(
            text_config=text, vision_config=CLIP, image_token_index=IMAGE_TOKEN, image_seq_length=4
        )
        return transformers.LlavaForConditionalGeneration(config)
    if kind == "mllama":
        config = transformers.MllamaConfig(
            text_config=MLLAMA, vision_config=MLLAMA_VISION, image_token_index=IMAGE_TOKEN
        )
        made = transformers.MllamaForConditionalGeneration(config)
        for name, parameter in made.named_parameters():
            if "gate" in name:  # they begin at 0, where nothing of the image reaches the loss
                torch.nn.init.constant_(parameter, 0.5)
        return made
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": rope},
        vision_config=QWEN_VISION,
        image_token_id=IMAGE_TOKEN,
        video_token_id=6,
        vision_start_token_id=7,
        vision_end_token_id=8,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def batch(kind: str = "llava", seed: int = 0, image: bool = True) -> dict[str, Any]:
    """Return one row of 8 tokens, 4 of them the image's."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(9, 64, (1, 8), generator=generator)
    ids = text.clone()
    if image:
        ids[:, 2:6] = IMAGE_TOKEN
    row = {"input_ids": ids, "labels": text, "attention_mask": torch.ones_like(ids)}
    if not image:
        return row
    if kind == "llava":
        return row | {"pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}
    if kind == "mllama":
        return row | {
            "input_ids": torch.where(ids == IMAGE_TOKEN, 6, ids),
            "pixel_values": torch.randn(1, 1, 1, 3, 16, 16, generator=generator),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, 8, 1, 1, dtype=torch.long),
        }
    return row | {
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).int(),
    }
