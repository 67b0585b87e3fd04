"""Emulated accelerators: names and sizes of the profile, time at least as asked, real gradients."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from offbeat.core.buckets.layout import specs_of_profile
from offbeat.core.runtime.model_checks import require_supported
from offbeat.profile import Bucket, Link, Profile

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from emulated_model import EmulatedModel  # pyright: ignore[reportMissingImports]

pytestmark = pytest.mark.timeout(60)

NAMES = ("head", "h.1.mlp", "h.1", "h.0#2", "h.0")


def buckets(forward_s: float = 0.0, backward_s: float = 0.0) -> list[Bucket]:
    return [Bucket(name, forward_s, backward_s, 4 * (8 + i)) for i, name in enumerate(NAMES)]


def passes(model: EmulatedModel, inputs: torch.Tensor, count: int = 1) -> list[torch.Tensor]:
    """Gradients after `count` SGD steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_a_profile_names_the_parameters():
    layers = tuple(Bucket(f"layers.{i}", 0.0, 0.0, 80) for i in (2, 1, 0))
    profile = Profile(layers, (Link("net", 0.0, 8e6),), 4)
    model = EmulatedModel(profile)
    require_supported(model)
    specs = specs_of_profile(model, profile)
    assert [spec.name for spec in specs] == ["layers.2", "layers.1", "layers.0"]
    assert [spec.parameters for spec in specs] == [(f"layers.{i}.weight",) for i in (2, 1, 0)]


def test_layers_may_be_nested_in_each_other():
    model = EmulatedModel(buckets())
    sizes = {name.removesuffix(".weight"): p.nbytes for name, p in model.named_parameters()}
    assert sizes == {bucket.name: bucket.size_bytes for bucket in buckets()}
    assert len(passes(model, torch.ones(1))) == len(NAMES)


def test_the_first_bucket_gets_its_gradient_first():
    model = EmulatedModel(buckets())
    order = []
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model(torch.ones(1)).backward()
    assert order == [f"{name}.weight" for name in NAMES]


def test_it_takes_at_least_as_long_as_asked():
    model = EmulatedModel(buckets(forward_s=0.002, backward_s=0.004), slowdown=1.5)
    assert model.emulated
    start_s = time.perf_counter()
    loss = model(torch.ones(1))
    loss.backward()
    # 0.2 ms of what came before the first layer may count as the layer's.
    assert time.perf_counter() - start_s >= 1.5 * len(NAMES) * 0.006 - 0.0002


def test_gradients_are_deterministic_and_those_of_the_loss():
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(passes(EmulatedModel(buckets()), torch.tensor([1.0, 2.0]), count=3))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
        assert torch.isfinite(one).all()
    torch.manual_seed(3)
    model = EmulatedModel(buckets())
    weights = [p.detach().clone().requires_grad_() for p in model.parameters()]
    loss = sum(0.5 / len(NAMES) * (w - 1.5).square().mean() for w in weights)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    emulated = model(torch.tensor([1.0, 2.0]))
    emulated.backward()
    assert emulated.item() == pytest.approx(loss.item())
    for p, w in zip(model.parameters(), weights, strict=True):
        assert p.grad is not None
        assert w.grad is not None
        # Per element, so that one learning rate suits every size.
        torch.testing.assert_close(p.grad, w.grad * w.numel() * len(NAMES))


def test_gradients_depend_on_the_inputs_and_scale_with_the_loss():
    torch.manual_seed(0)
    model = EmulatedModel(buckets())
    weight = model.get_parameter("head.weight")
    (2 * model(torch.zeros(1))).backward()
    torch.testing.assert_close(weight.grad, 2 * weight.detach())
    model(torch.ones(1)).backward()  # accumulates
    torch.testing.assert_close(weight.grad, 3 * weight.detach() - 1)


@pytest.mark.parametrize(
    ("layers", "slowdown", "name"),
    [
        ([], 1.0, "layers"),
        ([Bucket("a", 0, 0, 6)], 1.0, r"size_bytes of bucket 'a' \(6\)"),
        ([Bucket("a", 0, 0, 0)], 1.0, r"size_bytes of bucket 'a' \(0\)"),
        ([Bucket("a", 0, 0, 4), Bucket("a", 0, 0, 4)], 1.0, "'a'"),
        (buckets(), 0.0, "slowdown"),
        (buckets(), float("nan"), "slowdown"),
    ],
)
def test_models_that_cannot_be(layers, slowdown, name):
    with pytest.raises(ValueError, match=name):
        EmulatedModel(layers, slowdown=slowdown)


def test_the_lab_does_not_import_torch():
    code = "import sys, offbeat.lab; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
