"""Are the bounds of minimal sets bounds? `python -m benchmarks.minimal_bounds [--bags 1000] [--first 0]`.

Random bags of five to eight instances and bags with peaked attention (logits 5 to 500 apart), models that
pool with linear and nonlinear heads, both kinds of sets: the lower bound from the proof alone (one set tried)
and the bounds of the whole search, against every subset of the bag.

`--patches 20000 40000 200000` measures instead: seconds and peak memory of AttnMIL on random bags of 1,024
features, ascending, in one process.
"""

from __future__ import annotations

import argparse
import resource
import time
from itertools import combinations

import torch
from torch import Tensor, nn

import xmil
from xmil.core.text import markdown_table

WIDTH, SPREADS = 4, (1, 10, 30, 100)
MODELS = (
    ("attnmil", {}), ("attnmil", {"n_out_layers": 1}), ("attnmil", {"n_out_layers": 2}),
    ("attnmil", {"branches": 2}), ("attnmil", {"gated": True}), ("clam_sb", {}), ("clam_mb", {}),
)  # fmt: skip


def make(seed: int, *, peaked: bool) -> tuple[nn.Module, Tensor]:
    """A model and a bag of a seed."""
    name, params = MODELS[seed % len(MODELS)]
    sizes = {"in_dim": WIDTH, "n_classes": 2 + seed % 2, "dim": 8, "attention_dim": 4}
    model = xmil.create_model(name, seed=seed, **sizes, **params)
    bag = torch.randn(5 + seed % 4, WIDTH, generator=torch.Generator().manual_seed(seed))
    if peaked:
        sharpen(model, bag, SPREADS[seed // len(MODELS) % len(SPREADS)])
    return model, bag


@torch.no_grad()
def sharpen(model: nn.Module, bag: Tensor, spread: float) -> None:
    """Scale the attention so that its logits lie this far apart, times five."""
    last = [layer for layer in model.attention.modules() if isinstance(layer, nn.Linear)][-1]
    logits = model.attend(model.embed(bag.unsqueeze(0)))
    last.weight *= 5 * spread / float(logits.amax() - logits.amin())


@torch.no_grad()
def exhaustive(model: nn.Module, bag: Tensor, kind: str, target: int) -> int | None:
    """The size of the smallest proper subset that decides, by trying all; None if there is none."""
    whole = int(model(bag.unsqueeze(0)).argmax()) == target
    n = len(bag)
    for size in range(1, n):
        chosen = list(combinations(range(n), size))
        kept = [[i for i in range(n) if (i in own) == (kind == "keep")] for own in chosen]
        decisions = model(bag[torch.tensor(kept)]).argmax(dim=1) == target
        if bool(((decisions == whole) == (kind == "keep")).any()):
            return size
    return None


def count(seeds: range, *, peaked: bool) -> list[int]:
    """Sets looked for; bounds that are false; results that cross; searches that miss the size."""
    sets = false = crossed = missed = 0
    for seed in seeds:
        model, bag = make(seed, peaked=peaked)
        for kind in ("flip", "keep"):
            proof = xmil.minimal_set(model, bag, kind=kind, evaluations=1)
            full = xmil.minimal_set(model, bag, kind=kind)
            size = exhaustive(model, bag, kind, int(full.target))
            least = len(bag) if size is None else size
            sets += 1
            false += proof.lower > least or full.lower > least
            crossed += any(found.upper is not None and found.lower > found.upper for found in (proof, full))
            missed += (full.lower, full.upper) != (least, size)
    return [sets, false, crossed, missed]


def measure(n: int, kind: str) -> list[str]:
    """Seconds of one search, the peak memory so far, and what was found."""
    model = xmil.create_model("attnmil", in_dim=1024, n_classes=2, seed=0)
    bag = torch.randn(n, 1024, generator=torch.Generator().manual_seed(0))
    start = time.perf_counter()
    found = xmil.minimal_set(model, bag, kind=kind)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return [f"{n:,}", kind, f"{seconds:.1f}", f"{peak:.2f}", f"{found.lower:,}", f"{found.upper or 0:,}"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bags", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first bag; slices add up")
    parser.add_argument("--patches", type=int, nargs="+", help="measure bags of these sizes instead")
    args = parser.parse_args()
    if args.patches:
        rows = [measure(n, kind) for n in sorted(args.patches) for kind in ("keep", "flip")]
        print(markdown_table(["patches", "kind", "seconds", "peak GB", "lower", "upper"], rows))
        return
    torch.set_num_threads(1)
    seeds = range(args.first, args.first + args.bags)
    rows = [
        [name, str(args.bags), *map(str, count(seeds, peaked=name == "peaked"))]
        for name in ("random", "peaked")
    ]
    head = ["bags", "number", "sets", "false lower bounds", "lower above upper", "size missed"]
    print(markdown_table(head, rows))


if __name__ == "__main__":
    main()
