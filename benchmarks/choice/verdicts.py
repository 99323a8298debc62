"""What the verdict says of maps whose worth is known: `python -m benchmarks.choice.verdicts`.

Shuffled scores, faithful ones and their reverses on single bags; runs of shuffled and faithful maps over
cases; maps of a model whose head was drawn anew, judged on some slides and measured on others; and the
verdict's share of the time of a run of small slides.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

import xmil
from benchmarks.choice.nets import STANDARD, trained
from xmil.evaluate import Flips, Judge, judge_cohort
from xmil.methods import explain

D = 16


def net(seed: int) -> xmil.models.MILModel:
    """A model whose output depends on its patches."""
    model = xmil.create_model("attnmil", in_dim=D, n_classes=2, dim=16, seed=seed)
    with torch.no_grad():
        model.classifier.weight.mul_(4)
    return model


def bag(seed: int, n: int = 60) -> torch.Tensor:
    """Patches, a few of which stand out."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, D, generator=generator)
    x[: n // 6] += 2 * torch.randn(D, generator=generator)
    return x


def shuffled(tries: int, seed: int = 0, per_bag: int = 5) -> Counter[str]:
    """Verdicts on shuffled scores, a few for each bag."""
    kinds: Counter[str] = Counter()
    for i in range(tries // per_bag):
        model, x = net(seed + i), bag(seed + i)
        scores = explain(model, x, target=1, check=False).scores
        rng = np.random.default_rng([seed, i])
        drawn = [("shuffled", rng.permutation(scores)) for _ in range(per_bag)]
        kinds.update(v.kind for v in Judge(Flips(model, x, target=1), seed=seed + i).verdicts(drawn))
    return kinds


def faithful(tries: int, seed: int = 0) -> dict[str, Counter[str]]:
    """Verdicts on faithful scores (sampled Shapley values), and on their reverses."""
    kinds: dict[str, Counter[str]] = {name: Counter() for name in ("faithful", "reversed")}
    for i in range(tries):
        model, x = net(seed + i), bag(seed + i)
        options: dict[str, Any] = {"permutations": 60, "precision": None, "output": "probability"}
        e = explain(model, x, method="shapley", target=1, check=False, **options)
        scores = [("faithful", e.scores), ("reversed", -e.scores)]
        for verdict in Judge(Flips(model, x, target=1), seed=i).verdicts(scores):
            kinds[verdict.method][verdict.kind] += 1
    return kinds


def steps(cache: Path, bags: int = 5, n: int = 120) -> dict[int, float]:
    """How the SRG of curves of few steps correlates with that of 100, over maps and shuffled maps."""
    srgs: dict[int, list[float]] = {10: [], 20: [], 100: []}
    for name in STANDARD:
        for task in ("four_bags", "pos_neg_count"):
            one, rng = trained(name, "digits", task, 0, cache=cache), np.random.default_rng(0)
            patches = one.test.flatten(0, 1)
            for _ in range(bags):
                x = patches[rng.permutation(len(patches))[:n]]
                e = explain(one.net, x, check=False)
                flips = Flips(one.net, x, target=e.target)
                orders = np.stack([np.argsort(-own) for own in (e.scores, rng.permutation(e.scores))])
                for k, own in srgs.items():
                    own += flips.gains(orders, steps=k).tolist()
    return {k: float(np.corrcoef(own, srgs[100])[0, 1]) for k, own in srgs.items()}


def cohorts(tries: int, cases: int = 16, seed: int = 0) -> dict[str, Counter[str]]:
    """Verdicts on runs of 16 cases whose maps are shuffled, or right."""
    kinds: dict[str, Counter[str]] = {name: Counter() for name in ("shuffled", "faithful", "reversed")}
    model = net(seed)
    judges = [Judge(Flips(model, bag(seed + i, 30), target=1), seed=i) for i in range(cases)]
    maps = [
        explain(model, bag(seed + i, 30), target=1, output="log_odds", check=False).scores
        for i in range(cases)
    ]
    right = np.array([j.srgs([m])[0] for j, m in zip(judges, maps, strict=True)])
    rng = np.random.default_rng(seed)
    drawn = np.stack(
        [j.srgs([rng.permutation(m) for _ in range(tries)]) for j, m in zip(judges, maps, strict=True)]
    )
    for k in range(tries):
        kinds["shuffled"][judge_cohort({"lrp": drawn[:, k]}, units=range(cases), seed=k).kind] += 1
        some = rng.choice(cases, cases, replace=True)
        for name, sign in (("faithful", 1), ("reversed", -1)):
            kinds[name][judge_cohort({"lrp": sign * right[some]}, units=range(cases), seed=k).kind] += 1
    return kinds


def other_heads(tries: int, cases: int = 16, seed: int = 0) -> tuple[int, int]:
    """Maps of a model with another head: how often a verdict agrees with the SRG on as many other slides."""
    agree = told = 0
    for k in range(tries):
        model, other = net(seed + k), net(seed + k)
        with torch.no_grad():
            torch.manual_seed(k)
            other.classifier.weight.copy_(other.classifier.weight[torch.randperm(2)] * torch.randn(2, 1))
        srgs = []
        for i in range(2 * cases):
            x = bag(1000 * k + i, 30)
            scores = explain(other, x, target=1, output="log_odds", check=False).scores
            srgs.append(float(Judge(Flips(model, x, target=1), seed=i).srgs([scores])[0]))
        kind = judge_cohort({"lrp": srgs[:cases]}, units=range(cases), seed=k).kind
        mean = float(np.mean(srgs[cases:]))
        told += kind in ("better", "worse")
        agree += (kind, mean > 0) in (("better", True), ("worse", False))
    return agree, told


def overhead(slides: int, n: int = 300, name: str = "attnmil") -> float:
    """How much more CPU a run of small slides takes with its verdict, as a ratio; the better of two each."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "features").mkdir()
        for i in range(slides):
            xmil.write_bag(
                xmil.Bag(bag(i, n).numpy(), slide_id=f"s{i:04d}"), folder / "features" / f"s{i:04d}.h5"
            )
        xmil.save_model(xmil.create_model(name, in_dim=D, n_classes=2, seed=0), folder / "m.safetensors")
        seconds = {}
        for check in ("none", "auto", "none", "auto"):
            start = time.process_time()
            out = folder / f"{check}-{len(seconds)}-{time.time_ns()}"
            xmil.explain_slides(folder / "m.safetensors", folder / "features", out=out, check=check)
            seconds.setdefault(check, []).append(time.process_time() - start)
    return min(seconds["auto"]) / min(seconds["none"])


def main() -> None:
    """Print each table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=1000)
    parser.add_argument("--slides", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the shuffled scores")
    parser.add_argument("--model", default="attnmil", help="of the run that is timed")
    parser.add_argument("--cache", type=Path, default=Path("build/choice/nets"))
    parser.add_argument("--only", choices=("shuffled", "faithful", "runs", "heads", "steps", "overhead"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only in (None, "shuffled"):
        print("bags, shuffled:", dict(shuffled(options.tries, options.seed)))
    if options.only in (None, "faithful"):
        print("bags:", {k: dict(v) for k, v in faithful(options.tries // 5).items()})
    if options.only in (None, "runs"):
        print("runs:", {k: dict(v) for k, v in cohorts(options.tries).items()})
    if options.only in (None, "heads"):
        agree, told = other_heads(max(5, options.tries // 20))
        print(f"another head: {agree} of {told} verdicts agree with the SRG on other slides")
    if options.only in (None, "steps"):
        print("correlation with 100 steps:", {k: round(r, 4) for k, r in steps(options.cache).items()})
    if options.only in (None, "overhead"):
        ratio = overhead(options.slides, name=options.model)
        print(f"{options.model}: {options.slides} slides take {ratio:.2f} times as long with the verdict")


if __name__ == "__main__":
    main()
