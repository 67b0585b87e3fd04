"""What SelSync does to weights, and what its change of the gradient norm says about curvature.

    python benchmarks/papers/curvature.py [--out FILE] [--seeds 3] [--steps 150]

1. Parameters (PA) or gradients (GA) averaged: after equal steps, how weights are
   distributed, how far replicas are from each other and from BSP's weights.
2. The change of the gradient norm, as SelSync computes it, beside the largest eigenvalue of the
   Hessian of a fixed batch, along a run of BSP. Power iteration; it is first compared with a full
   Hessian of a tiny network.

4 ranks, threads of one process; digits (SGD with momentum) and a small GPT (AdamW). Runs are kept
in a file; a second start goes on. About 10 minutes of one core.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from offbeat.strategies import BSP, SelSync, Strategy

sys.path.insert(0, str(Path(__file__).parents[1]))  # modules that benchmarks share

from figures import spread
from tasks import GPT, Batch, Task, digits_task, held_out_text, pictures
from threads import Job, Trained, consolidated, remembered, train, untimed

RANKS, WIDTH = 4, 64
DELTAS = (0.3, 0.05)
FIXED_PICTURES, FIXED_BATCHES = 128, 2  # that the Hessian is of
EVERY = 10  # iterations between two Hessians
TOLERANCE, MOST_PRODUCTS = 1e-3, 100  # of power iteration
QUANTILES = torch.linspace(0.005, 0.995, 100)
OTHER_ORDER = 1000  # added to the seed of the data, for a second run of BSP

STRATEGIES: dict[str, Strategy] = {
    "BSP": BSP(),
    **{f"PA, {delta:g}": SelSync(delta=delta) for delta in DELTAS},
    **{f"GA, {delta:g}": SelSync(delta=delta, aggregate="gradients") for delta in DELTAS},
}


TASKS = {"digits": digits_task(WIDTH), "GPT": GPT}


def fixed(name: str) -> Batch:
    """The batch that the Hessian is of."""
    if name == "digits":
        images, labels, *_ = pictures()
        return images[:FIXED_PICTURES], labels[:FIXED_PICTURES]
    tokens, targets = zip(*held_out_text()[:FIXED_BATCHES], strict=True)
    return torch.cat(tokens), torch.cat(targets)


def run(
    task: Task,
    strategy: Strategy,
    seed: int,
    steps: int,
    data_seed: int | None = None,
    look: Callable[[int, int, nn.Module], None] | None = None,
) -> list[Trained]:
    """Every rank after training; the model depends on `seed`, the batches on `data_seed`."""
    torch.manual_seed(seed)
    model = task.model()
    profile = untimed(model, RANKS)
    data_seed = seed if data_seed is None else data_seed
    job = Job(
        model,
        task.optimizer,
        lambda world, rank: task.batches(data_seed, world.size, rank),
        task.loss,
        task.warmup,
        look,
    )
    return train(job, strategy.plan(profile), profile, steps)


# ---- weights: PA against GA -----------------------------------------------------------------


def weights(name: str, seed: int, steps: int) -> dict[str, Any]:
    """By way of averaging: LSSR, distances, and the moments of every matrix."""
    task = TASKS[name]
    torch.manual_seed(seed)
    start = flat(task.model())
    runs = {label: run(task, strategy, seed, steps) for label, strategy in STRATEGIES.items()}
    runs["BSP, other order"] = run(task, BSP(), seed, steps, data_seed=seed + OTHER_ORDER)
    reference = runs["BSP"][0].model
    moved = torch.linalg.vector_norm(flat(reference) - start)
    found = {}
    for label, trained in runs.items():
        replicas = torch.stack([flat(one.model) for one in trained])
        mean = replicas.mean(0)
        apart = (replicas - mean).square().sum(1).mean().sqrt()
        off = [torch.linalg.vector_norm(one - flat(reference)) for one in replicas]
        found[label] = {
            "lssr": trained[0].local_share if trained[0].voted else 0.0,
            "loss": fmean(fmean(one.losses[-10:]) for one in trained),
            "held out": task.held_out_loss(consolidated(trained)),
            "one replica held out": task.held_out_loss(trained[0].model.eval()),
            "replicas apart": (apart / moved).item(),
            "off BSP": (torch.stack(off).mean() / moved).item(),
            "mean off BSP": (torch.linalg.vector_norm(mean - flat(reference)) / moved).item(),
            "layers": layers([one.model for one in trained], reference),
        }
    return found


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])


def layers(replicas: Sequence[nn.Module], reference: nn.Module) -> dict[str, dict[str, float]]:
    """Of every matrix: mean, standard deviation, excess kurtosis, means over replicas; and how far
    its distribution is from the reference's (Wasserstein 1, over the reference's deviation)."""
    found = {}
    for name, p in reference.named_parameters():
        if p.dim() < 2:
            continue
        theirs = p.detach().double().reshape(-1)
        rows = []
        for model in replicas:
            mine = model.get_parameter(name).detach().double().reshape(-1)
            z = (mine - mine.mean()) / mine.std()
            q = QUANTILES.double()
            distance = (mine.quantile(q) - theirs.quantile(q)).abs().mean() / theirs.std()
            rows.append([mine.mean(), mine.std(), (z**4).mean() - 3, distance])
        numbers = np.array(rows, dtype=float).mean(axis=0).tolist()
        found[name] = dict(zip(("mean", "std", "kurtosis", "distance"), numbers, strict=True))
    return found


# ---- curvature ------------------------------------------------------------------------------


def largest_eigenvalue(
    loss: Tensor, parameters: Sequence[Tensor], start: Tensor | None = None
) -> tuple[float, Tensor, int]:
    """The largest eigenvalue of the Hessian of `loss`, its vector, and the number of
    Hessian-vector products; by power iteration from `start`, by default a random vector."""
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    gradient = torch.cat([g.reshape(-1) for g in gradients])

    def times(vector: Tensor) -> Tensor:
        parts = torch.autograd.grad(gradient, parameters, vector, retain_graph=True)
        return torch.cat([part.reshape(-1) for part in parts]).detach()

    start = torch.randn_like(gradient).detach() if start is None else start
    value, vector, products = power(times, start)
    if value < 0:  # the largest one lies at the other end
        lowest = value
        value, vector, more = power(lambda v: times(v) - lowest * v, start)
        value, products = value + lowest, products + more
    return value, vector, products


def power(times: Callable[[Tensor], Tensor], vector: Tensor) -> tuple[float, Tensor, int]:
    """The eigenvalue of largest size of what `times` multiplies with, its vector, products."""
    value, vector = 0.0, vector / torch.linalg.vector_norm(vector)
    for products in count(1):
        product = times(vector)
        before, value = value, torch.dot(product, vector).item()
        vector = product / torch.linalg.vector_norm(product)
        if abs(value - before) <= TOLERANCE * abs(value) or products == MOST_PRODUCTS:
            return value, vector, products
    raise AssertionError("it ends")


def largest_error() -> float:
    """Relative error of power iteration on tiny networks, against their full Hessians."""
    errors = []
    for seed in range(5):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        x, y = torch.randn(20, 4, dtype=torch.float64), torch.randint(3, (20,))
        start = {name: p.detach() for name, p in model.named_parameters()}
        sizes = [p.numel() for p in start.values()]

        def loss_at(
            w: Tensor,
            model: nn.Module = model,
            start: dict[str, Tensor] = start,
            sizes: list[int] = sizes,
            batch: Batch = (x, y),
        ) -> Tensor:
            parts = zip(start.items(), w.split(sizes), strict=True)
            named = {name: part.view_as(p) for (name, p), part in parts}
            scores = torch.func.functional_call(model, named, batch[0])
            return nn.functional.cross_entropy(scores, batch[1])

        whole = torch.func.hessian(loss_at)(torch.cat([p.reshape(-1) for p in start.values()]))
        exact = torch.linalg.eigvalsh(whole).max().item()
        loss = nn.functional.cross_entropy(model(x), y)
        found, _, _ = largest_eigenvalue(loss, list(model.parameters()))
        errors.append(abs(found / exact - 1))
    return max(errors)


def course(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Along a run of BSP: per iteration every rank's change of the gradient norm; every so many
    iterations the largest eigenvalue and the gradient's squared norm, both of the fixed batch."""
    task, states = TASKS[name], {}

    def look(rank: int, step: int, model: nn.Module) -> None:
        if rank == 0 and step % EVERY == 0:
            states[step] = copy.deepcopy(model.state_dict())

    trained = run(task, SelSync(delta=0, aggregate="gradients"), seed, steps, look=look)
    model, batch, vector = task.model().train(), fixed(name), None
    parameters = list(model.parameters())
    values, norms, counts = [], [], []
    for state in states.values():
        model.load_state_dict(state)
        with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
            loss = task.loss(model, batch)
            value, vector, products = largest_eigenvalue(loss, parameters, vector)
        squares = [g.square().sum().item() for g in torch.autograd.grad(loss, parameters)]
        values.append(value)
        norms.append(sum(squares))
        counts.append(products)
    return {
        "steps": list(states),
        "eigenvalues": values,
        "norms": norms,
        "products": counts,
        "changes": [one.changes for one in trained],
        "losses": np.mean([one.losses for one in trained], axis=0).tolist(),
    }


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, for values without ties."""
    places = [np.argsort(np.argsort(values)) for values in (a, b)]
    return float(np.corrcoef(places[0], places[1])[0, 1])


def correlations(found: dict[str, Any]) -> dict[str, float]:
    """Of one run: what goes with the largest eigenvalue. The first iteration has no change."""
    steps, values = found["steps"][1:], found["eigenvalues"]
    every = np.mean(found["changes"], axis=0)
    most = np.max(found["changes"], axis=0)
    window = [float(np.mean(every[max(1, s - EVERY + 1) : s + 1])) for s in steps]
    moved = np.abs(np.diff(values)) / np.abs(values[:-1])
    return {
        "change, then": rank_correlation([every[s] for s in steps], values[1:]),
        "largest change of a rank, then": rank_correlation([most[s] for s in steps], values[1:]),
        "change, mean of the 10 iterations before": rank_correlation(window, values[1:]),
        "the same, both as differences": rank_correlation(
            np.diff(window).tolist(), np.diff(values[1:]).tolist()
        ),
        "that mean with the relative change of the eigenvalue": rank_correlation(
            window, moved.tolist()
        ),
        "gradient's squared norm": rank_correlation(found["norms"], values),
        "iteration": rank_correlation(list(map(float, found["steps"])), values),
    }


# ---- tables ---------------------------------------------------------------------------------


def show_weights(name: str, runs: Sequence[dict[str, Any]]) -> None:
    keys = ("lssr", "loss", "held out", "one replica held out", "replicas apart", "off BSP")
    keys += ("mean off BSP",)
    print(f"\n**{name}, weights**; distances over the way that BSP's weights went\n")
    print("| averaged |", " | ".join(keys), "|\n|---|" + "---|" * len(keys))
    for label in runs[0]:
        cells = [spread([r[label][k] for r in runs], middle=fmean) for k in keys]
        print("|", label, "|", " | ".join(cells), "|")
    print("\n| matrix | of | mean | std | kurtosis | distance |\n|---|---|---|---|---|---|")
    for layer in runs[0]["BSP"]["layers"]:
        for label in runs[0]:
            rows = [r[label]["layers"][layer] for r in runs]
            cells = [f"{fmean(row[k] for row in rows):.4f}" for k in rows[0]]
            print("|", layer, "|", label, "|", " | ".join(cells), "|")


def show_course(name: str, runs: Sequence[dict[str, Any]]) -> None:
    print(f"\n**{name}, largest eigenvalue**\n")
    print("| seed | first | highest (iteration) | last | change: first ten | last ten | products |")
    print("|---|---|---|---|---|---|---|")
    for seed, found in enumerate(runs):
        values, every = found["eigenvalues"], np.mean(found["changes"], axis=0)
        top = int(np.argmax(values))
        ends = f"{np.mean(every[1:11]):.3f} | {np.mean(every[-10:]):.3f}"
        products = f"{min(found['products'])} to {max(found['products'])}"
        highest = f"{values[top]:.1f} ({found['steps'][top]})"
        print(f"| {seed} | {values[0]:.1f} | {highest} | {values[-1]:.1f} | {ends} | {products} |")
    rows = [correlations(found) for found in runs]
    print("\n| Spearman with the eigenvalue |", " | ".join(f"seed {i}" for i in range(len(runs))))
    print("|---|" + "---|" * len(runs))
    for key in rows[0]:
        print("|", key, "|", " | ".join(f"{row[key]:+.2f}" for row in rows), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("curvature.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"power iteration, largest relative error on tiny networks: {largest_error():.1e}")
    found: dict[str, list[dict[str, Any]]] = {}
    for act in (course, weights):
        for seed in range(options.seeds):
            for name in TASKS:
                where = f"{name} {act.__name__} {options.steps}"
                run_one = partial(act, name, seed, options.steps)
                one = remembered(options.out, f"{where}, seed {seed}", run_one)
                found.setdefault(where, []).append(one)
    for name in TASKS:
        show_weights(name, found[f"{name} weights {options.steps}"])
        show_course(name, found[f"{name} course {options.steps}"])


if __name__ == "__main__":
    main()
