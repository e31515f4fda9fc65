"""LLaDA2-MoE, the block diffusion language models of inclusionAI (LLaDA2.0 and 2.1, mini and flash)."""

from __future__ import annotations


def register() -> None:
    """Make the family known to Transformers' Auto classes, unless it is; importing this package alone does not."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from torchturbo.models.llada2.configuration import LLaDA2MoeConfig, MergedConfig

    if LLaDA2MoeConfig.model_type in CONFIG_MAPPING:
        return
    from torchturbo.models.llada2.modeling import LLaDA2MoeModel, LLaDA2MoeModelLM

    AutoConfig.register(LLaDA2MoeConfig.model_type, LLaDA2MoeConfig)
    if MergedConfig.model_type not in CONFIG_MAPPING:
        AutoConfig.register(MergedConfig.model_type, MergedConfig)
    AutoModel.register(LLaDA2MoeConfig, LLaDA2MoeModel)
    AutoModelForCausalLM.register(LLaDA2MoeConfig, LLaDA2MoeModelLM)
