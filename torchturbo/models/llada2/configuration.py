"""LLaDA2-MoE's configuration: the keys of the published ``config.json`` files; the defaults are those of the mini model.

What is read is written again under the same names, so that the code that comes with the published weights, and serving
engines that know the architecture, read an exported folder as they read the original.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files

ONLY: dict[str, Any] = {
    "embedding_dropout": 0.0,
    "moe_router_enable_expert_bias": True,
    "norm_head": False,
    "norm_softmax": False,
    "output_dropout": 0.0,
    "router_dtype": "fp32",
    "score_function": "sigmoid",
    "use_rmsnorm": True,
    "use_sliding_window": False,
    "using_split_qkv_in_self_attention": False,
}
"""Keys with one value in all published files: the model computes nothing else, and says so."""
ROTARY = ("rope_theta", "partial_rotary_factor")
"""Keys that Transformers moves into ``rope_parameters`` and the published files have beside the others."""


@strict
class LLaDA2MoeConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a LLaDA2-MoE model.

    Parameters
    ----------
    num_experts, num_experts_per_tok
        E, and how many of them a token is sent to.
    n_group, topk_group
        Experts stand in ``n_group`` groups, and a token's are chosen from its best ``topk_group`` groups.
    num_shared_experts
        Every token's expert is that many times as wide as the others; None or 0 for none.
    first_k_dense_replace
        Layers at the start that have one MLP instead of experts.
    norm_topk_prob, routed_scaling_factor
        Whether the scores of a token's experts are divided by their sum, and what they are multiplied by then.
    partial_rotary_factor
        The part of each head that is rotated, its first dimensions; ``rotary_dim`` says how many that are.
    use_bias, use_qkv_bias
        Whether the attention's output projection, and its input projection, have a bias.

    Raises
    ------
    ValueError
        With everything that the model can't compute.

    """

    model_type = "llada2_moe"
    is_causal = False
    attribute_map = {"num_local_experts": "num_experts"}

    vocab_size: int = 157184
    hidden_size: int = 2048
    intermediate_size: int = 5120
    num_hidden_layers: int = 20
    num_attention_heads: int = 16
    num_key_value_heads: int | None = 4
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 16384
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = False
    tie_word_embeddings: bool = False
    pad_token_id: int | None = 156892
    use_bias: bool = False
    use_qkv_bias: bool = False
    attention_dropout: float | int = 0.0
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | int = 600000
    partial_rotary_factor: float | int = 0.5
    rotary_dim: int | None = None
    max_window_layers: int = 28
    num_experts: int = 256
    num_experts_per_tok: int = 8
    num_shared_experts: int | None = 1
    moe_intermediate_size: int = 512
    first_k_dense_replace: int = 1
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 2.5
    output_router_logits: bool = False
    embedding_dropout: float | int = 0.0
    moe_router_enable_expert_bias: bool = True
    norm_head: bool = False
    norm_softmax: bool = False
    output_dropout: float | int = 0.0
    router_dtype: str = "fp32"
    score_function: str = "sigmoid"
    use_rmsnorm: bool = True
    use_sliding_window: bool = False
    using_split_qkv_in_self_attention: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what follows from other keys."""
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        super().__post_init__(**kwargs)
        rotary: dict[str, Any] = self.rope_parameters or {}
        self.rope_theta, self.partial_rotary_factor = (rotary.get(name, getattr(self, name)) for name in ROTARY)
        if self.rotary_dim is None:
            self.rotary_dim = self._rotated

    @property
    def _rotated(self) -> int:
        return int((self.head_dim or 0) * self.partial_rotary_factor)

    def validate_architecture(self) -> None:
        """Raise ValueError for what the model does not compute; all of it at once."""
        super().validate_architecture()
        wrong = [
            f"{key} is {getattr(self, key)!r}, expected {value!r}, which all published models have"
            for key, value in ONLY.items()
            if getattr(self, key) != value
        ]
        if self.rotary_dim != self._rotated:
            product = f"head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor}"
            wrong.append(f"rotary_dim is {self.rotary_dim}, expected {product} = {self._rotated}")
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            wrong.append(f"{self.num_attention_heads} heads are no multiple of {self.num_key_value_heads} of keys")
        wrong += self._routing_problems()
        if wrong:
            raise ValueError("; ".join(wrong))

    def _routing_problems(self) -> Iterator[str]:
        if self.n_group < 1 or self.num_experts % self.n_group or self.num_experts // self.n_group < 2:
            yield f"num_experts is {self.num_experts}, expected at least 2 for each of {self.n_group} groups, all alike"
            return
        if not 1 <= self.topk_group <= self.n_group:
            yield f"topk_group is {self.topk_group}, expected 1 to n_group, {self.n_group}"
        most = self.num_experts // self.n_group * self.topk_group
        if not 1 <= self.num_experts_per_tok <= most:
            yield f"num_experts_per_tok is {self.num_experts_per_tok}, expected 1 to {most}, the experts of a token's groups"

    def to_dict(self) -> dict[str, Any]:
        """Return the keys as the published files have them: what is rotated, and how, stands beside the others."""
        output: dict[str, Any] = super().to_dict()
        rotary = output.pop("rope_parameters", None) or {}
        output |= {name: rotary.pop(name) for name in ROTARY if name in rotary}
        output.pop("is_causal", None)  # Transformers notes it here while a forward runs
        output["rope_scaling"] = rotary if rotary.get("rope_type", "default") != "default" else None
        return output

    def save_pretrained(self, save_directory: Any, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Write ``config.json``; code of the original folder that it refers to (``auto_map``) goes with it."""
        with self._published_code(Path(save_directory)):
            super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)

    @contextmanager
    def _published_code(self, folder: Path) -> Iterator[None]:
        """Copy the code that ``auto_map`` names into a folder, and leave out of it what is not there, for this block.

        Other programs that load the export may need that code. References to a repository (``owner/name--file.Class``)
        stay as they are.
        """
        before: dict[str, str] | None = getattr(self, "auto_map", None)
        if before is None:
            yield
            return
        kept = {kind: name for kind, name in before.items() if "--" in name or self._copied(name, folder)}
        self.auto_map = kept
        if not kept:
            del self.auto_map
        try:
            yield
        finally:
            self.auto_map = before

    def _copied(self, reference: str, folder: Path) -> bool:
        """Copy the file of ``module.Class`` and what it imports from beside it; return whether all were there."""
        if not (origin := self._name_or_path):
            return False
        code = Path(origin, f"{reference.partition('.')[0]}.py")
        try:
            files = [code, *map(Path, get_relative_import_files(str(code)))]
        except OSError:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            if file.resolve() != (folder / file.name).resolve():
                shutil.copyfile(file, folder / file.name)
        return True


class MergedConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a folder in dFactory's own layout, whose experts are stacked: it is refused by name."""

    model_type = "llada2_moe_veomni"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Raise ValueError with what makes a published folder of it."""
        published = LLaDA2MoeConfig.model_type
        raise ValueError(
            f"{cls.model_type} is dFactory's merged layout, expected the published one: split its experts by dFactory's "
            f"moe_convertor.py --mode split, and set model_type to {published}"
        )
