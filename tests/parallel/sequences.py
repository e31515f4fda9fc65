"""Models, micro-batches and one comparison for the tests of sequence parallelism: ranks beside one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import parity
import tiny
import torch
import torch.distributed as dist
from torch import Tensor

LENGTH = 13
"""Tokens of a row; no number of ranks divides it."""


def model(kind: str = "llama", **changes: Any) -> Any:
    """Return a tiny model whose attention weighs: from its plain initialisation every token would see all alike."""
    made = tiny.model(kind, use_cache=False, **changes)  # with a cache Transformers looks for no documents
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1 and "embed" not in name and "head" not in name:
                parameter.mul_(4)
    return made.train()


def mla(**changes: Any) -> Any:
    """Return a model with multi-head latent attention: queries and keys of size 12, values of size 8."""
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1}
    return model(
        "deepseek_v3",
        num_key_value_heads=4,
        head_dim=4,
        topk_group=1,
        first_k_dense_replace=1,
        **sizes,
        **experts,
        **changes,
    )


def ids(rows: int = 2, length: int = LENGTH, seed: int = 5) -> Tensor:
    return torch.randint(3, 320, (rows, length), generator=torch.Generator().manual_seed(seed))


def batch(length: int = LENGTH, prompt: int = 0, **more: Any) -> dict[str, Any]:
    """Return a micro-batch whose first tokens are no targets."""
    tokens = ids(length=length)
    labels = tokens.clone()
    labels[:, :prompt] = -100
    return {"input_ids": tokens, "labels": labels, **more}


def padded(left: bool) -> dict[str, Any]:
    """Return rows of 9 and 13 tokens."""
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[0, :4] = 0
    mask = mask if left else mask.flip(1)
    made = batch(attention_mask=mask)
    made["labels"] = made["labels"].masked_fill(mask == 0, -100)
    return made


def packed() -> dict[str, Any]:
    """Return rows of three documents each, of other lengths in the two rows."""
    rows = [[3, 6, 4], [7, 1, 5]]
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    return batch(position_ids=positions)


def ready(heads: int = 1, *, added: bool = False) -> dict[str, Any]:
    """Return a micro-batch with a mask of its own [B, H, S, S]: causal, with some pairs taken out."""
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(2, heads, LENGTH, LENGTH, generator=generator) < 0.6
    allowed = (allowed | torch.eye(LENGTH, dtype=torch.bool)) & torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return batch(attention_mask=torch.where(allowed, 0.0, torch.finfo().min) if added else allowed)


def run(made: Any, given: Mapping[str, Any], loss_of: Callable[..., Any] | None = None) -> parity.Step:
    """Return loss and gradients of one micro-batch."""
    made.zero_grad()
    loss = (loss_of or (lambda m, g: m(**g).loss))(made, dict(given))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients.values()]))
    return parity.Step(float(loss.detach()), float(norm), gradients)


def summed(step: parity.Step) -> parity.Step:
    """Return a step with the shares of all ranks added up. A collective."""
    loss = torch.tensor(step.loss)
    for tensor in (loss, *step.gradients.values()):
        dist.all_reduce(tensor)
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in step.gradients.values()]))
    return parity.Step(float(loss), float(norm), step.gradients)


def shared(made: Any, base: Any = None) -> Any:
    """Put sequence parallelism over all ranks into a model."""
    from torchturbo.parallel.sequence import SequenceParallel

    parallel = SequenceParallel(dist.group.WORLD)
    parallel.install(made, made if base is None else base)
    return parallel


def errors(made: Any, given: Mapping[str, Any], base: Any = None, loss_of: Any = None) -> dict[str, float]:
    """Return the relative errors of ranks that share a micro-batch against a plain copy of the model. A collective.

    Training gives loss, norm and gradients; a forward without gradients gives the loss and whole logits.
    """
    plain = copy.deepcopy(made)
    expected = run(plain, given, loss_of)
    parallel = shared(made, base)
    found = parity.errors(summed(run(made, given, loss_of)), expected)
    with torch.no_grad():
        one, several = plain.eval()(**given), made.eval()(**given)
    assert one.logits.shape == several.logits.shape
    found["evaluated loss"] = abs(float(several.loss - one.loss)) / float(one.loss)
    kept = given["labels"].ne(-100) if "labels" in given else slice(None)  # a fully masked row's logits are anything
    difference = (several.logits - one.logits)[kept]
    found["evaluated logits"] = float(difference.norm() / one.logits[kept].norm())
    parallel.remove()
    return found
