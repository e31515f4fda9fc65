"""The rule itself in one process: Newton-Schulz, its relation to torch.optim.Muon and to Moonlight's form, AdamW beside."""

from __future__ import annotations

import copy
import io

import muon_models
import pytest
import torch
from muon_models import gradients, optimizer, weights
from torch import Tensor, nn

from torchturbo.optim.exchange import one_ahead
from torchturbo.optim.muon import MuonAdamW, orthogonalised
from torchturbo.optim.newton_schulz import newton_schulz
from torchturbo.optim.reference import orthogonalise


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (20, 20), (2, 3)], ids=str)
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    """And the singular vectors stay."""
    u, _, v = torch.linalg.svd(random(*shape), full_matrices=False)
    spread = torch.linspace(0.2, 5, len(v))

    found = newton_schulz(u * spread @ v)

    values = torch.diag(u.T @ found @ v.T)
    assert bool(((values > 0.6) & (values < 1.3)).all())
    torch.testing.assert_close(found, u * values @ v, rtol=1e-4, atol=1e-4)


def test_a_batch_is_each_of_its_matrices() -> None:
    """Over all leading dimensions, against the reference in float64."""
    matrices = random(2, 3, 9, 5)

    found = newton_schulz(matrices)

    for at in range(2):
        for each in range(3):
            expected = orthogonalise(matrices[at, each].double())
            torch.testing.assert_close(found[at, each].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9, 5), (5, 9), (1, 5, 9)], ids=str)
def test_a_matrix_alone_is_no_batch_of_one(shape: tuple[int, ...]) -> None:
    """A batched product of one matrix costs up to half as much again, in bf16 on a CPU."""
    matrix = random(*shape).bfloat16()

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        found = newton_schulz(matrix)

    assert not {"aten::bmm", "aten::baddbmm"} & {event.name for event in seen.events()}
    torch.testing.assert_close(found, newton_schulz(matrix.expand(2, *shape[-2:]))[0].view(shape), rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    """DCP takes a step without gradients to make the state that it loads into; some experts get no token."""
    matrices = torch.stack([torch.zeros(4, 6), random(4, 6)]).to(dtype)

    found = newton_schulz(matrices)

    assert 0 == found[0].abs().max()
    assert bool(found[1].abs().max() > 0.1)
    assert dtype == found.dtype


def single(shape: tuple[int, ...] = (24, 16)) -> nn.Parameter:
    return nn.Parameter(random(*shape, seed=5))


def steps(parameter: nn.Parameter, stepper: torch.optim.Optimizer, count: int = 3) -> Tensor:
    """Return how far a parameter moves in some steps with gradients of very unlike singular values."""
    before = parameter.detach().clone()
    for step in range(count):
        parameter.grad = random(*parameter.shape, seed=step + 10) @ torch.diag(
            torch.linspace(0.1, 2, parameter.shape[1])
        )
        stepper.step()
    return parameter.detach() - before


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
def test_it_is_torchs_muon_with_the_scale_of_moonlight(shape: tuple[int, int]) -> None:
    """The same rule; torch iterates in bf16, whose noise is all that is between them."""
    ours, theirs = single(shape), single(shape)
    own = MuonAdamW([{"params": [ours], "use_muon": True}], lr=0.02, weight_decay=0.1, ns_dtype=torch.bfloat16)
    torchs = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")

    moved, expected = steps(ours, own), steps(theirs, torchs)

    assert float((moved - expected).norm() / expected.norm()) < 0.02


def test_bf16_changes_an_update_by_little() -> None:
    """As much as torch's own optimizer, which knows nothing else."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter = single()
        found.append(steps(parameter, MuonAdamW([{"params": [parameter], "use_muon": True}], lr=0.02, ns_dtype=dtype)))

    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 0.05


def test_an_update_has_the_size_of_adamws() -> None:
    """0.2, whatever the shape (arXiv 2502.16982, section 2.2): so one learning rate serves both."""
    for shape in ((64, 64), (32, 256), (256, 32)):
        update = orthogonalised(random(*shape))

        assert 0.2 == pytest.approx(float(update.square().mean().sqrt()), rel=0.25)


def test_the_learning_rate_of_each_step_counts() -> None:
    """A schedule changes it in the group, and a resumed run brings another one."""
    parameter = single()
    stepper = MuonAdamW([{"params": [parameter], "use_muon": True}], lr=1.0)
    stepper.param_groups[0]["lr"] = 0.0
    assert 0 == steps(parameter, stepper).abs().max()

    stepper.param_groups[0]["lr"] = 0.5
    once = steps(parameter, stepper, 1)
    stepper.param_groups[0]["lr"] = torch.tensor(0.25)
    again = steps(parameter, stepper, 1)

    assert 2 == pytest.approx(float(once.norm() / again.norm()), rel=0.1)


def test_the_rest_is_torchs_adamw_bit_for_bit() -> None:
    """With and without decay, in the kernel that is asked for."""
    for fused in (None, True):
        plain, ours = nn.Linear(6, 4), nn.Linear(6, 4)
        ours.load_state_dict(plain.state_dict())
        groups = [[{"params": [m.weight], "weight_decay": 0.1}, {"params": [m.bias]}] for m in (plain, ours)]
        torchs = torch.optim.AdamW(groups[0], lr=0.01, weight_decay=0.0, betas=(0.8, 0.99), eps=1e-6, fused=fused)
        own = MuonAdamW(groups[1], lr=0.01, betas=(0.8, 0.99), eps=1e-6, fused=fused)
        for step in range(3):
            for model, stepper in ((plain, torchs), (ours, own)):
                model.weight.grad, model.bias.grad = random(4, 6, seed=step), random(4, seed=step)
                stepper.step()

        assert torch.equal(plain.weight, ours.weight)
        assert torch.equal(plain.bias, ours.bias)


def test_a_step_runs_its_hooks_once_and_its_closure() -> None:
    """As any torch optimizer; the observers count by these hooks."""
    parameter, calls = single(), []
    stepper = MuonAdamW([{"params": [parameter], "use_muon": True}, {"params": [nn.Parameter(torch.ones(2))]}])
    torch.optim.AdamW([nn.Parameter(torch.ones(1))]).step()  # the class has been patched by its own instances
    stepper.register_step_pre_hook(lambda *_: calls.append("before"))
    stepper.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        calls.append("closure")
        return loss

    assert float(stepper.step(closure).detach()) > 0
    assert ["before", "closure", "after"] == calls


def test_a_vector_is_refused() -> None:
    """There is nothing to orthogonalise."""
    with pytest.raises(ValueError, match=r"expected \[M, K\] or \[E, M, K\], got \[3\]"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "use_muon": True}])


def test_copies_and_files_go_on_as_the_optimizer_would() -> None:
    """Deep copies keep the layouts of fused parameters; a state dict survives torch.save and weights_only."""
    model = muon_models.model("qwen3_moe")
    stepper = optimizer(model)
    gradients(model, 0)
    stepper.step()
    second, copied = copy.deepcopy((model, stepper))
    file = io.BytesIO()
    torch.save(stepper.state_dict(), file)
    third = copy.deepcopy(model)
    fresh = optimizer(third)
    fresh.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))

    for each, own in ((model, stepper), (second, copied), (third, fresh)):
        gradients(each, 1)
        own.step()

    for other in (weights(second), weights(third)):
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights(model).items())


def test_each_item_is_made_before_the_one_ahead_of_it_is_used() -> None:
    """So that its exchange runs meanwhile; no more than two are alive."""
    made: list[int] = []

    def make(count: int) -> object:
        for at in range(count):
            made.append(at)
            yield at

    assert [(0, [0, 1]), (1, [0, 1, 2]), (2, [0, 1, 2])] == [(at, list(made)) for at in one_ahead(make(3))]  # type: ignore[arg-type]
    assert [] == list(one_ahead(iter([])))
