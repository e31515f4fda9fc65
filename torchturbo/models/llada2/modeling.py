"""LLaDA2-MoE for Transformers 5: a decoder that attends to both sides, with sigmoid-routed experts in groups.

LLaDA2.0, https://arxiv.org/abs/2512.15745; parameters have the names of inclusionAI's own model files. Trained and
decoded by block diffusion, the model is given a mask [B or 1, 1, S, S]; without one, every token sees all others.

Layers that are the same in GLM-4.5-MoE are Transformers' own. Sizes: B rows, S tokens, H hidden, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.generation.utils import GenerationMixin
from transformers.integrations.moe import use_experts_implementation
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeMLP,
    Glm4MoeRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)
from transformers.utils.generic import can_return_tuple, maybe_autocast, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from torchturbo.models.llada2.configuration import LLaDA2MoeConfig
from torchturbo.models.llada2.conversion import register_conversions

WRITTEN = "LLaDA2 is written block by block and not token by token; use torchturbo.objectives.diffusion.decode.decode"
"""What generation is answered with."""

register_conversions(LLaDA2MoeConfig.model_type)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the format that norms and routers compute in: float32, and float64 in a model that has it."""
    return torch.promote_types(dtype, torch.float32)


class LLaDA2MoeRMSNorm(nn.Module):
    """RMSNorm (https://arxiv.org/abs/1910.07467) of [..., H], rounded to the input's format before it is weighted."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the normalised states."""
        wide = hidden_states.to(_wide(hidden_states.dtype))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(hidden_states.dtype)


class LLaDA2MoeRotaryEmbedding(Glm4MoeRotaryEmbedding):  # type: ignore[misc]
    """Cosines and sines of the part of each head that is rotated."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


class LLaDA2MoeMLP(Glm4MoeMLP):  # type: ignore[misc]
    """A gated MLP."""


class LLaDA2MoeTopkRouter(nn.Module):
    """Chooses each token's experts by sigmoid scores, from its best groups of experts (DeepSeek-V3, arXiv:2412.19437).

    A group counts by the sum of its two best scores. A bias that belongs to each expert and gets no gradient moves the
    choice alone; weights are the scores without it.
    """

    expert_bias: Tensor

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.n_group, self.topk_group = config.n_group, config.topk_group
        self.norm_topk_prob = config.norm_topk_prob and self.top_k > 1
        self.routed_scaling_factor = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(self.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, dtype=torch.float32))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens [T, H].

        Returns
        -------
        tuple
            Logits [T, E], and of the experts of each token weights [T, K] and indices [T, K].

        """
        dtype = _wide(hidden_states.dtype)
        with maybe_autocast(hidden_states.device.type, enabled=False):
            logits = functional.linear(hidden_states.to(dtype), self.weight.to(dtype))
        scores = logits.sigmoid()
        indices = self._choose(scores + self.expert_bias)
        weights = scores.gather(1, indices)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices

    def _choose(self, scores: Tensor) -> Tensor:
        groups = scores.view(len(scores), self.n_group, -1)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(self.topk_group, dim=-1, sorted=False).indices
        closed = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(1, best, False)
        return groups.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(1).topk(self.top_k, dim=-1).indices


@use_experts_implementation
class LLaDA2MoeExperts(nn.Module):
    """The experts of a layer, stacked: gate and up projections [E, 2 I, H], down projections [E, H, I]."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim, self.intermediate_dim = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum [T, H] of what its experts make of each token, one expert after the other."""
        output = torch.zeros_like(hidden_states)
        for expert in torch.unique(top_k_index).tolist():
            token, slot = torch.where(top_k_index == expert)
            gate, up = functional.linear(hidden_states[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            made = functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            output.index_add_(0, token, (made * top_k_weights[token, slot, None]).to(output.dtype))
        return output


class LLaDA2MoeSparseMoeBlock(nn.Module):
    """A router with its experts, and an expert that every token meets."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__()
        self.gate = LLaDA2MoeTopkRouter(config)
        self.experts = LLaDA2MoeExperts(config)
        shared = config.moe_intermediate_size * (config.num_shared_experts or 0)
        self.shared_experts = LLaDA2MoeMLP(config, shared) if shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return [B, S, H] of tokens [B, S, H]."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, weights, indices = self.gate(tokens)
        output: Tensor = self.experts(tokens, indices, weights).view_as(hidden_states)
        return output if self.shared_experts is None else output + self.shared_experts(hidden_states)


class LLaDA2MoeAttention(nn.Module):
    """Attention to both sides, with normalised queries and keys of which a part is rotated."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = int(config.head_dim or 0)
        self.num_heads, self.num_key_value_heads = config.num_attention_heads, int(config.num_key_value_heads or 0)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = False
        width = (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=config.use_qkv_bias)
        self.query_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.use_bias)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, [B, S, H] to [B, S, H]; the second result are the weights, where the implementation has them."""
        rows, length = hidden_states.shape[:2]
        heads = self.query_key_value(hidden_states).view(rows, length, -1, self.head_dim).transpose(1, 2)
        split = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        query, key, value = heads.split(split, dim=1)
        query, key = self.query_layernorm(query), self.key_layernorm(key)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation or "eager", eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.dense(output.reshape(rows, length, -1).contiguous()), weights


class LLaDA2MoeDecoderLayer(GradientCheckpointingLayer):  # type: ignore[misc]
    """Attention, then an MLP or experts, each behind a norm and beside what it adds to."""

    def __init__(self, config: LLaDA2MoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.attention = LLaDA2MoeAttention(config, layer_idx)
        dense = layer_idx < config.first_k_dense_replace
        self.mlp = LLaDA2MoeMLP(config) if dense else LLaDA2MoeSparseMoeBlock(config)
        self.input_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return [B, S, H] of hidden states [B, S, H]."""
        attended, _ = self.attention(self.input_layernorm(hidden_states), position_embeddings, attention_mask, **kwargs)
        hidden_states = hidden_states + attended
        made: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + made


class LLaDA2MoePreTrainedModel(PreTrainedModel):  # type: ignore[misc]
    """What Transformers must know of the family."""

    config: LLaDA2MoeConfig
    config_class = LLaDA2MoeConfig
    base_model_prefix = "model"
    is_diffusion_model = True
    supports_gradient_checkpointing = True
    _input_embed_layer = "word_embeddings"
    _no_split_modules = ["LLaDA2MoeDecoderLayer"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {
        "hidden_states": LLaDA2MoeDecoderLayer,
        "attentions": LLaDA2MoeAttention,
        "router_logits": OutputRecorder(LLaDA2MoeTopkRouter, index=0),
    }

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        spread = self.config.initializer_range
        if isinstance(module, LLaDA2MoeTopkRouter):
            init.zeros_(module.expert_bias)
        elif not isinstance(module, LLaDA2MoeExperts):
            return
        for weight in module.parameters(recurse=False):
            init.normal_(weight, mean=0.0, std=spread)


class LLaDA2MoeModel(LLaDA2MoePreTrainedModel):
    """The decoder: tokens to hidden states."""

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(LLaDA2MoeDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = LLaDA2MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LLaDA2MoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Return the hidden states [B, S, H] of a batch.

        Parameters
        ----------
        input_ids, inputs_embeds
            Tokens [B, S], or what stands for them [B, S, H]: one of both.
        attention_mask
            [B, S] with 0 for padding; [B or 1, 1, S, S], bool with True for a pair that attends or added to the
            scores; flex attention's BlockMask; None where every token sees all others.
        position_ids
            [B or 1, S]; from 0 on where not given. Rows of several documents need a mask that parts them: positions
            don't.

        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("expected one of input_ids and inputs_embeds")
        if kwargs.get("is_causal"):
            raise ValueError("is_causal: this model attends to both sides; give it a mask [1, 1, S, S]")
        hidden_states: Tensor = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device)[None]
        mask = create_bidirectional_mask(
            config=self.config,
            inputs_embeds=hidden_states,
            attention_mask=_ready(attention_mask, hidden_states.dtype, self.config._attn_implementation),
        )
        rotary = self.rotary_emb(hidden_states, position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states, position_embeddings=rotary, attention_mask=mask, position_ids=position_ids, **kwargs
            )
        return MoeModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def _ready(mask: Any, dtype: torch.dtype, implementation: str | None) -> Any:
    """Return a mask [B or 1, 1, S, S] as attention takes it: only sdpa takes a bool one for what it is."""
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return mask
    least = torch.finfo(dtype).min
    if mask.dtype == torch.bool:
        hidden = torch.zeros((), dtype=dtype, device=mask.device)
        return mask if implementation == "sdpa" else torch.where(mask, hidden, least)
    return mask if mask.dtype == dtype else mask.to(dtype).clamp(min=least)


class LLaDA2MoeModelLM(LLaDA2MoePreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """The decoder with its head; the name is the published one.

    It is a model that generates for those that ask for one, as PEFT's CAUSAL_LM does; token by token it can't.
    Tokens that are masked are predicted at their own place. ``labels`` are shifted by one all the same, as Transformers'
    ``ForCausalLMLoss`` does for every model, unless ``shift_labels`` stand beside them: those are taken as they are.
    """

    _tied_weights_keys = {"lm_head.weight": "model.word_embeddings.weight"}

    def __init__(self, config: LLaDA2MoeConfig) -> None:
        super().__init__(config)
        self.model = LLaDA2MoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss_type = "ForCausalLM"  # Transformers looks for it in the class's name
        self.post_init()

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Return logits [B, S, V], and with ``labels`` [B, S] the loss; see :meth:`LLaDA2MoeModel.forward`.

        ``shift_labels`` and ``num_items_in_batch`` reach the loss function, as in Transformers' own models.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )

    def generate(self, *_: Any, **__: Any) -> Any:
        """Raise ValueError: tokens are written by blocks, and not one after the other."""
        raise ValueError(f"generate: {WRITTEN}")

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Any = None, **kwargs: Any
    ) -> Any:
        """Raise ValueError, where a program calls ``GenerationMixin.generate`` itself."""
        raise ValueError(f"generate: {WRITTEN}")
