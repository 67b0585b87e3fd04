"""Flat storage: the same tensors, in one place, without a copy."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.models import Case, build_model, build_optimizer, profile_of
from cases.oddities import Odd
from cases.stub_devices import Launches
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import offbeat.core.buckets.checksum as checksum_module
import offbeat.core.buckets.flat as flat_module
import offbeat.core.buckets.memory as memory_module
from offbeat.core.buckets.checksum import checksum
from offbeat.core.buckets.flat import Flat
from offbeat.core.buckets.gradients import Gradients
from offbeat.core.buckets.layout import BucketSpec, group_parameters, specs_of_profile
from offbeat.core.buckets.memory import HUGE_BYTES, empty
from offbeat.core.buckets.module_buffers import ModuleBuffers
from offbeat.core.buckets.optimizer_state import StateStore
from offbeat.core.runtime.model_checks import require_supported
from offbeat.plan import Payload
from offbeat.profile import Bucket, Link, Profile


def specs(model: nn.Module, buffers: tuple[str, ...] = ()) -> list[BucketSpec]:
    """One bucket per parameter, the buffers in the last one."""
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    return [BucketSpec(n, (n,), buffers if n == names[-1] else ()) for n in names]


def with_gradients(flat: Flat) -> Flat:
    """The storage with gradients, which are in `p.grad`."""
    flat.create_gradients()
    for p, view in zip(flat.parameters, flat.views(), strict=True):
        p.grad = view
    return flat


def inside(tensor: Tensor, flat: Tensor) -> bool:
    """Whether a tensor's memory lies in another's."""
    start, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    return start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end


# ---- zero copies ----------------------------------------------------------------------------


def test_parameters_gradients_and_buffers_are_views() -> None:
    model = build_model(Case("conv"))
    values = {n: t.clone() for n, t in model.state_dict().items()}
    flat = with_gradients(Flat(model, specs_of_profile(model, profile_of(Case("conv"), 1))))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, values[name]), name
    for b, bucket in enumerate(flat.buckets):
        run = range(b, b + 1)
        [params], [grads] = flat.tensors("param", run), flat.tensors("grad", run)
        for p in bucket.parameters:
            assert inside(p, params)
            assert inside(p.grad, grads)
        assert inside(flat.absence_counts(b), grads), "they travel together"
        assert len(flat.absence_counts(b)) == len(bucket.parameters)
        params.fill_(b)
        assert all((p == b).all() for p in bucket.parameters)
    assert (model[2].running_mean == 3).all(), "statistics travel with their module"


def test_a_run_of_buckets_is_one_slice() -> None:
    model = build_model(Case("mlp"))
    flat = with_gradients(Flat(model, specs_of_profile(model, profile_of(Case("mlp"), 1))))
    sizes = [sum(p.numel() for p in bucket.parameters) for bucket in flat.buckets]
    counts = [len(bucket.parameters) for bucket in flat.buckets]
    for start in range(4):
        for stop in range(start + 1, 5):
            run, size = range(start, stop), sum(sizes[start:stop])
            for buffer, more in (("param", 0), ("grad", sum(counts[start:stop]))):
                [tensor] = flat.tensors(buffer, run)
                assert tensor.numel() == size + more
                assert tensor.is_contiguous()


def test_only_writes_of_the_user_change_the_version_of_gradients() -> None:
    model = build_model(Case("mlp"))
    flat = Flat(model, specs(model))
    flat.create_gradients()
    gradients = Gradients(flat, 1, gathers=True)
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    gradients.gather(len(flat.buckets))
    assert gradients.is_intact()
    [grads] = flat.tensors("grad", range(len(flat.buckets)))
    assert grads.abs().sum() > 0
    before = flat.grad_version()
    gradients.zero_grad(set_to_none=False)
    assert grads.abs().sum() == 0
    assert flat.grad_version() == before, "ours does not look like the user's"
    gradients.parameters[0].grad.mul_(2)
    assert flat.grad_version() != before


def test_gradients_that_exist_are_kept() -> None:
    model = build_model(Case("mlp"))
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    before = [p.grad.clone() for p in model.parameters() if p.requires_grad]
    flat = Flat(model, specs(model))
    flat.create_gradients()
    gradients = Gradients(flat, 1, gathers=True)
    for _ in range(2):
        after = [p.grad for p in model.parameters() if p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
        gradients.gather(len(flat.buckets))


def test_nothing_of_the_model_is_left_twice() -> None:
    """After moving house twice, as after observation, the old storage is gone."""
    model = build_model(Case("mlp"))
    first = with_gradients(Flat(model, specs(model)))
    second = with_gradients(Flat(model, list(reversed(specs(model)))))
    del first
    gc.collect()
    trainable = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for p in model.parameters()
        if p.requires_grad
        for t in (p.data, p.grad)
    }
    count = sum(len(bucket.parameters) for bucket in second.buckets)
    assert sum(storages.values()) == 2 * trainable + 8 * count  # who has none, a number each
    assert all(inside(p, second.parameter_tensors()[0]) for p in second.parameters)
    assert len(second.parameter_tensors()) == 1


def test_what_was_before_is_let_go_as_soon_as_it_is_empty(monkeypatch) -> None:
    """Never are both parameters and gradients there twice."""
    model = build_model(Case("mlp"))
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    first = Flat(model, specs(model))
    first.create_gradients()
    params, grads = (weakref.ref(first.contents(name)[0][0]) for name in ("param", "grad"))
    alive: list[tuple[bool, bool]] = []

    def made(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        alive.append((params() is not None, grads() is not None))
        return torch.empty(size, dtype=dtype, device=device)

    monkeypatch.setattr(flat_module, "empty", made)
    Flat(model, list(reversed(specs(model))), first).create_gradients()
    assert alive == [(True, True), (False, False)]
    assert all(torch.equal(p, value) for p, value in zip(trained, before, strict=True))


def test_strides_are_kept() -> None:
    model = Odd()
    before = {n: (p.size(), p.stride(), p.clone()) for n, p in model.named_parameters()}
    flat = with_gradients(Flat(model, specs(model, ("sliced",))))
    for name, p in model.named_parameters():
        size, stride, value = before[name]
        assert (p.size(), p.stride()) == (size, stride), name
        assert p.grad.stride() == stride, name
        assert torch.equal(p, value), name
    assert model.sliced.tolist() == [[0, 2]] * 3
    assert len(flat.tensors("param", range(len(flat.buckets)))) == 1


def test_tied_weights_are_stored_once() -> None:
    model = build_model(Case("tied"))
    flat = Flat(model, specs(model))
    assert model.head.weight is model.embedding.weight
    assert sum(t.numel() for t in flat.parameter_tensors()) == sum(
        p.numel() for p in model.parameters()
    )


def test_every_dtype_has_its_own_storage() -> None:
    model = build_model(Case("mixed", dtype=torch.float32))
    flat = Flat(model, specs(model))
    assert {t.dtype for t in flat.parameter_tensors()} == {torch.float32, torch.bfloat16}
    run = flat.tensors("param", range(len(flat.buckets)))
    assert sum(t.nbytes for t in run) == sum(p.nbytes for p in model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in model.middle.parameters())


# ---- layout ---------------------------------------------------------------------------------


def test_modules_stay_together_and_small_ones_join() -> None:
    model = build_model(Case("backwards"))
    order = [
        "head.weight",
        "head.bias",
        "middle.bias",
        "middle.weight",
        "first.weight",
        "first.bias",
    ]
    alone = group_parameters(model, order, min_bytes=1)
    assert [spec.name for spec in alone] == ["head", "middle", "first"]
    assert alone[1].parameters == ("middle.bias", "middle.weight")
    joined = group_parameters(model, order, min_bytes=300)
    assert [spec.name for spec in joined] == ["middle", "first"], "named after the largest"
    assert [spec.name for spec in group_parameters(model, order, min_bytes=10**9)] == ["middle"]


def test_bucket_names_are_unique() -> None:
    model = build_model(Case("backwards"))
    order = [
        "head.weight",
        "middle.bias",
        "head.bias",
        "middle.weight",
        "first.weight",
        "first.bias",
    ]
    names = [spec.name for spec in group_parameters(model, order, min_bytes=1)]
    assert names == ["head", "middle", "head#2", "middle#2", "first"]


def test_a_bucket_has_one_dtype() -> None:
    model = build_model(Case("mixed", dtype=torch.float32))
    order = [n for n, _ in model.named_parameters()]
    groups = group_parameters(model, order, min_bytes=10**9)
    assert [len(spec.parameters) for spec in groups] == [2, 2, 2]


def test_buffers_of_another_dtype_stay_at_home() -> None:
    """They keep their dtype; each rank has its own until consolidate()."""
    model = nn.Sequential(nn.Linear(2, 2).to(torch.bfloat16), nn.BatchNorm1d(2, affine=False))
    order = ["0.weight", "0.bias"]
    buffers = ["1.running_mean", "1.running_var"]
    assert group_parameters(model, order, 1, buffers)[0].buffers == ()
    model[1].to(torch.bfloat16)
    assert group_parameters(model, order, 1, buffers)[0].buffers == tuple(buffers)


def test_changed_buffers_are_found_by_value() -> None:
    """Batch norm writes its statistics without touching their version counters."""
    model = build_model(Case("conv"))
    model.register_buffer("constant", torch.ones(3))
    buffers = ModuleBuffers(model, True, torch.device("cpu"))
    assert buffers.changed_names() is None
    assert buffers.changed_names() == []
    model(torch.randn(2, 2, 4, 4, dtype=torch.float64))
    written = ("running_mean", "running_var", "num_batches_tracked")
    assert buffers.changed_names() == [f"{layer}.{name}" for layer in (2, 5) for name in written]
    assert buffers.changed_names() == []


# ---- profiles -------------------------------------------------------------------------------


def test_profile_may_name_modules() -> None:
    model = build_model(Case("backwards"))
    sizes = {n: sum(p.nbytes for p in m.parameters()) for n, m in model.named_children()}
    profile = handmade([Bucket(n, 0, 0, sizes[n]) for n in ("head", "middle", "first")])
    assert [spec.parameters for spec in specs_of_profile(model, profile)] == [
        (f"{n}.weight", f"{n}.bias") for n in ("head", "middle", "first")
    ]


def handmade(buckets: list[Bucket]) -> Profile:
    return Profile(tuple(buckets), (Link("net", 0.0, 1.0),), 1)


@pytest.mark.parametrize(
    ("buckets", "text"),
    [
        ([Bucket("tail", 0, 0, 8)], "its bucket 'tail' holds parameters that the model does not"),
        ([Bucket("head", 0, 0, 8)], "bucket 'head' has 8 bytes there and 240 in the model"),
        ([Bucket("head", 0, 0, 240)], "parameter 'first.bias' must be in exactly one bucket"),
        (
            [Bucket("head", 0, 0, 240), Bucket("again", 0, 0, 24, tensors=("head.bias",))],
            "must be in exactly one bucket",
        ),
        ([Bucket("x", 0, 0, 8, tensors=("head.gain",))], "'x' holds tensor 'head.gain' that"),
    ],
)
def test_profile_of_another_model(buckets: list[Bucket], text: str) -> None:
    with pytest.raises(ValueError, match="the profile does not match the model") as caught:
        specs_of_profile(build_model(Case("backwards")), handmade(buckets))
    assert text in str(caught.value)
    assert "measure the model again with `offbeat profile`" in str(caught.value)


def test_profile_with_two_dtypes_in_a_bucket() -> None:
    model = nn.Sequential(build_model(Case("mixed", dtype=torch.float32)))
    size = sum(p.nbytes for p in model.parameters())
    with pytest.raises(ValueError, match="'0' of the profile must hold parameters of one dtype"):
        specs_of_profile(model, handmade([Bucket("0", 0, 0, size)]))


# ---- what cannot be flat --------------------------------------------------------------------


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def complex_() -> nn.Module:
    return nn.Linear(2, 2).to(torch.complex64)


def shared() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(model[0].weight.data)
    return model


def slices(a: Tensor, b: Tensor) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight, model[1].weight = nn.Parameter(a.view(2, 2)), nn.Parameter(b.view(2, 2))
    return model


def overlapping() -> nn.Module:
    whole = torch.zeros(6)
    return slices(whole[:4], whole[2:])


def frozen() -> nn.Module:
    return nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")  # torch's own remark
@pytest.mark.filterwarnings("ignore:Complex modules are a new feature")
@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lazy, "parameter '0.weight' is lazy; run one forward pass before prepare"),
        (complex_, "'weight' has dtype torch.complex64; only real floats are supported"),
        (shared, "'0.weight' and '1.weight' share memory but are two objects; tie them by"),
        (overlapping, "'0.weight' and '1.weight' share memory but are two objects; tie them by"),
        (frozen, "the model has no parameter that requires a gradient; nothing to train"),
    ],
)
def test_unsupported_models(build, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        require_supported(build())
    assert text in str(caught.value)


def test_supported_models() -> None:
    for name in ("mlp", "conv", "tied"):
        require_supported(build_model(Case(name)))
    require_supported(Odd())
    whole = torch.zeros(8)
    require_supported(slices(whole[:4], whole[4:]))  # neighbours
    require_supported(slices(whole.view(2, 4)[:, :2], whole.view(2, 4)[:, 2:]))  # columns


# ---- alignment ------------------------------------------------------------------------------


def odd_model() -> nn.Module:
    """Sizes that push what follows out of line: 3, 21 and 15 numbers, and running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3), nn.Linear(3, 5)).double()


ODD_SPECS = [
    BucketSpec("last", ("2.bias", "2.weight")),
    BucketSpec("norm", ("1.weight", "1.bias"), ("1.running_mean", "1.running_var")),
    BucketSpec("first", ("0.weight", "0.bias")),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_aligned_parameters_gradients_and_buffers(dtype: torch.dtype) -> None:
    """As a kernel of a GPU needs them that was compiled before the buckets changed."""
    model = odd_model().to(dtype)
    values = {n: t.clone() for n, t in model.state_dict().items()}
    plain = Flat(odd_model().to(dtype), ODD_SPECS)
    flat = with_gradients(Flat(model, ODD_SPECS, alignment_bytes=16))
    for p in model.parameters():
        p.grad.fill_(3)
    assert flat.sizes_bytes == plain.sizes_bytes, "a profile counts parameters alone"
    assert flat.buffer_bytes == plain.buffer_bytes
    [params], [grads] = flat.parameter_tensors(), flat.contents("grad")[0]
    for name, p in model.named_parameters():
        assert (p.data_ptr() - params.data_ptr()) % 16 == 0, name
        assert (p.grad.data_ptr() - grads.data_ptr()) % 16 == 0, name
        assert torch.equal(p, values[name])
    for name in ("1.running_mean", "1.running_var"):
        buffer = model.get_buffer(name)
        assert (buffer.data_ptr() - params.data_ptr()) % 16 == 0
        assert torch.equal(buffer, values[name])
    gradients = [p.grad for p in model.parameters()]
    for tensor, kept in ((params, [*values.values()]), (grads, gradients)):
        assert tensor.count_nonzero() == sum(int(t.count_nonzero()) for t in kept if t.dim())
    assert [len(flat.absence_counts(b)) for b in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("alignment", [1, 16])
@pytest.mark.parametrize("buffer", ["grad", "param"])
def test_slices_cover_a_bucket_once(buffer: str, alignment: int) -> None:
    flat = with_gradients(Flat(odd_model(), ODD_SPECS, alignment_bytes=alignment))
    for b in range(3):
        whole, run = flat.bucket(buffer, b), range(b, b + 1)
        for parts in (1, 2, 3, 7):
            slices = [Payload(buffer, run, i, parts) for i in range(parts)]
            messages = [flat.message_tensors(one, 0)[0] for one in slices]
            assert sum(m.numel() for m in messages) == whole.numel()
            offsets = [m.data_ptr() for m in messages if m.numel()]
            assert offsets == sorted({*offsets}), "one after the other"
            pairs = [flat.split_payload(one, 0, buffer)[0] for one in slices]
            numbers = [n for own, _ in pairs for n in own]
            behind = [t for _, more in pairs for t in more]
            assert sum(t.numel() for t in (*numbers, *behind)) == whole.numel()


def test_aligned_state() -> None:
    model = odd_model()
    optimizer = torch.optim.Adam(model.parameters())
    flat = Flat(model, ODD_SPECS, alignment_bytes=16)
    store = StateStore(optimizer, flat)
    model(torch.ones(2, 7, dtype=torch.float64)).sum().backward()
    optimizer.step()
    before = {p: s["exp_avg"].clone() for p, s in optimizer.state.items()}
    [tensor] = store.tensors(range(3))
    for p, state in optimizer.state.items():
        assert (state["exp_avg"].data_ptr() - tensor.data_ptr()) % 16 == 0
        assert torch.equal(state["exp_avg"], before[p])
    assert sum(map(store.bytes_of, range(3))) == 2 * sum(p.nbytes for p in model.parameters())


def test_restored_parameters_are_aligned() -> None:
    model = odd_model()
    flat = Flat(model, ODD_SPECS, alignment_bytes=16)
    places = [p.data_ptr() for p in model.parameters()]
    for p in model.parameters():
        p.data = p.data + 1
    values = [p.detach().clone() for p in model.parameters()]
    flat.restore_parameters()
    assert [p.data_ptr() for p in model.parameters()] == places
    assert all(torch.equal(p, v) for p, v in zip(model.parameters(), values, strict=True))


# ---- memory ---------------------------------------------------------------------------------


def test_storage_that_fits_once_moves_through_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have memory for one copy of the parameters and one of the gradients only."""
    model = odd_model()
    before = Flat(model, ODD_SPECS)
    before.create_gradients()
    values = [p.detach().clone() for p in model.parameters()]
    held = StorageWeakRef(before.parameter_tensors()[0].untyped_storage())
    create, made = flat_module.empty, list[int]()

    def allocate(size: int, *key: Any) -> Tensor:
        if not held.expired():
            raise torch.OutOfMemoryError
        made.append(size)
        return create(size, *key)

    monkeypatch.setattr(flat_module, "empty", allocate)
    Flat(model, ODD_SPECS[::-1], before)
    assert len(made) == 1
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))


def advice_of(address: int) -> str:
    """Return the flags of the mapping that contains an address: `hg` for huge pages."""
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if (place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)) is not None:
            begin, end = (int(number, 16) for number in place.groups())
        elif line.startswith("VmFlags:") and begin <= address < end:
            return line
    raise ValueError(f"address ({address:#x}) is not mapped")


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="needs Linux")
def test_large_tensors_are_in_huge_pages() -> None:
    """Aligned to them, so that all whole pages of the tensor are huge, and no others."""
    for dtype in (torch.float32, torch.float64, torch.uint8):
        count = 5 * HUGE_BYTES // 2 // dtype.itemsize  # two and a half pages
        tensor = empty(count, dtype, torch.device("cpu"))
        assert (tensor.numel(), tensor.dtype, tensor.is_contiguous()) == (count, dtype, True)
        assert tensor.data_ptr() % HUGE_BYTES == 0
        flags = [advice_of(tensor.data_ptr() + page * HUGE_BYTES) for page in range(3)]
        assert [" hg" in one for one in flags] == [True, True, False]
        tensor.fill_(1)
        assert tensor.sum().item() == count
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_views_of_huge_pages_are_where_messages_read(order: tuple[int, int]) -> None:
    """For matrices with transposed strides, too."""
    model = nn.Sequential(nn.Linear(1200, 700), nn.Linear(700, 3))
    for p in model.parameters():
        if p.dim() == 2:
            p.data = p.data.permute(order).contiguous().permute(order)
    flat = with_gradients(Flat(model, specs(model)))
    for b, bucket in enumerate(flat.buckets):
        for name in ("param", "grad"):
            [sent] = flat.tensors(name, range(b, b + 1))
            [p] = bucket.parameters
            view = p if name == "param" else p.grad
            assert view is not None
            with torch.no_grad():
                view.fill_(b + 1)
            assert set(sent[: p.numel()].tolist()) == {b + 1}
            assert sent.data_ptr() == view.data_ptr()


@pytest.mark.parametrize("system", ["linux", "darwin"])
def test_other_tensors_have_the_memory_of_torch(
    monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setattr(memory_module.sys, "platform", system)
    size = HUGE_BYTES - 1 if system == "linux" else 2 * HUGE_BYTES
    tensor = empty(size, torch.uint8, torch.device("cpu"))
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == size


# ---- checksums ------------------------------------------------------------------------------


def test_checksum_sees_bits_and_places() -> None:
    x = torch.tensor([1.0, 2.0, 3.0])
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(x[[1, 0, 2]])
    assert checksum(x) != checksum(torch.tensor([1.0, 2.0, 3.0000002]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert checksum(nan) == checksum(nan.clone())
    turned = torch.arange(6.0).view(2, 3).t()
    assert checksum(turned) == checksum(turned.contiguous())


def test_checksum_of_many_tensors_is_that_of_their_bytes() -> None:
    """However they are cut, also across the chunks that are read at a time, and misaligned."""
    x = torch.randn(700_001, generator=torch.Generator().manual_seed(0))
    whole = checksum(x)
    assert checksum(*x.split([1, 3, 262_143, 0, 437_854])) == whole
    for place in (0, 262_144, 700_000):
        changed = x.clone()
        changed[place] += 1
        assert checksum(changed) != whole
    swapped = x.roll(262_144)  # by a whole chunk
    assert checksum(swapped) != whole


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool, torch.complex64],
    ids=str,
)
def test_checksum_of_every_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([1, 0, 1]).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(torch.tensor([0, 1, 1]).to(dtype))


@pytest.mark.parametrize("batch", [2, 5, 64])
def test_checksum_in_batches_of_chunks_is_the_same(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few operations of a GPU, the same sum: a GPU's is compared with a processor's."""
    monkeypatch.setattr(checksum_module, "_CHUNK", 1 << 13)
    x = torch.arange(30_000, dtype=torch.int64).mul_(6364136223846793005)
    pieces = [t.view(torch.uint8) for t in x.split([7_001, 1, 1_023, 1_024, 20_000, 951])]
    expected = checksum_module._fold_chunks(pieces, 1)
    assert checksum_module._fold_chunks(pieces, batch) == expected


def test_checksum_takes_few_operations_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_module, "_CHUNK", 1 << 13)
    x = torch.zeros(64 << 13, dtype=torch.uint8)
    counts = []
    for batch in (1, 64):
        with Launches() as launches:
            checksum_module._fold_chunks([x], batch)
        counts.append(launches.names.total())
    assert counts[1] < counts[0] / 10


def test_checksum_of_more_than_a_chunk() -> None:
    x = torch.zeros((1 << 20) + 5)
    x[-1] = 1
    y = torch.zeros((1 << 20) + 5)
    y[4] = 1
    assert checksum(x) == checksum(x.clone())
    assert checksum(x) != checksum(y)


# ---- optimizer state ------------------------------------------------------------------------

MOMENTS = ("exp_avg", "exp_avg_sq")


def test_state_has_one_layout_whatever_was_used() -> None:
    """A place for every parameter; what does not exist is zero, and is not created."""
    case = Case("branches", "adam")
    sizes = []
    for sign in (1, -1):
        model, optimizer, store = state_store(case)
        model(sign * torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        unused = model.negative if sign > 0 else model.positive
        for p in unused.parameters():
            p.grad = None
        optimizer.step()
        tensors = store.tensors(range(4))
        sizes.append([t.numel() for t in tensors])
        assert all(p not in optimizer.state for p in unused.parameters())
        kept = sum(
            (s["exp_avg"].abs().sum() + s["exp_avg_sq"].abs().sum())
            for s in optimizer.state.values()
        )
        assert sum(t.abs().sum() for t in tensors) == pytest.approx(kept.item())
    assert sizes[0] == sizes[1] == [2 * sum(p.numel() for p in model.parameters())]


def test_state_is_shared_with_the_optimizer() -> None:
    model, optimizer, store = state_store(Case("mlp", "nesterov"))
    for _ in range(2):
        model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        [flat] = store.tensors(range(4))
    flat.fill_(7.0)
    assert all((s["momentum_buffer"] == 7).all() for s in optimizer.state.values())
    assert store.tensors(range(4))[0] is flat
    assert sum(store.bytes_of(b) for b in range(4)) == flat.nbytes


def test_reset_state_begins_anew() -> None:
    model, optimizer, store = state_store(Case("mlp", "adam"))
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    optimizer.step()
    store.reset(range(1))
    assert model[6].weight not in optimizer.state
    assert model[4].weight in optimizer.state
    store.tensors(range(4))
    optimizer.step()
    assert optimizer.state[model[6].weight]["step"] == 1
    assert optimizer.state[model[4].weight]["step"] == 2


def test_trying_an_optimizer_out_leaves_no_trace() -> None:
    calls: list[int] = []
    model, optimizer, store = state_store(Case("mlp", "adamw"))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # patches step()
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert store.bytes_of(0) == 2 * sum(p.nbytes for p in model[6].parameters())
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert calls == []
    assert len(optimizer.state) == 0


def state_store(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, StateStore]:
    model = build_model(case)
    optimizer = build_optimizer(case, model)
    flat = Flat(model, specs_of_profile(model, profile_of(case, 1)))
    return model, optimizer, StateStore(optimizer, flat)
