"""Explaining against a forward pass, against the naive way, and its memory: `python -m benchmarks core`.

Every time is the best of several; every figure is a ratio within one run. Memory is the peak of a process of
its own on the CPU, and of torch's allocator on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

import xmil
import xmil.nn.attention
from benchmarks.naive import dense_relevance, looped_singles
from benchmarks.record import machine_name, write_results
from xmil.lrp import replay
from xmil.network import frozen

WIDTH = 768


def best(run: Callable[[], object], device: str, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        _synchronise(device)
        start = time.perf_counter()
        run()
        _synchronise(device)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def setting(
    name: str, n: int, device: str
) -> tuple[xmil.models.MILModel, torch.Tensor, Callable[[], object]]:
    name, _, dim = name.partition("-")
    params = {"dim": int(dim)} if dim else {}
    model = xmil.create_model(name, in_dim=WIDTH, n_classes=2, seed=0, **params).to(device)
    x = torch.randn(1, n, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)

    def forward() -> object:
        with torch.no_grad(), frozen(model):
            return model(x)

    return model, x, forward


def transformer(name: str, n: int, device: str, repeats: int) -> dict[str, float]:
    """Seconds of a forward pass; lrp with and without its check, and attention, in forward passes."""
    model, x, forward = setting(name, n, device)
    forward()
    found = {"forward_s": best(forward, device, repeats)}
    with torchs_attention():
        forward()
        found["torchs_s"] = best(forward, device, repeats)
    ways = {"lrp": {}, "unchecked": {"check": False}, "attention": {"method": "attention"}}
    for way, options in ways.items():
        run = lambda o=options: xmil.explain(model, x, target=1, **{"method": "lrp", **o})  # noqa: E731
        for _ in range(3):  # the second bag of a shape is recorded on a GPU
            run()
        found[way] = best(run, device, repeats) / found["forward_s"]
    return found


@contextmanager
def torchs_attention() -> Iterator[None]:
    """Attention of few queries to many keys by torch's kernel, as a GPU would run it without a split."""
    ours = xmil.nn.attention.leaves_gpu_idle
    xmil.nn.attention.leaves_gpu_idle = lambda *_: False
    try:
        yield
    finally:
        xmil.nn.attention.leaves_gpu_idle = ours


def pooled(n: int, device: str) -> dict[str, float]:
    model, x, forward = setting("attnmil", n, device)
    forward()
    one = best(forward, device, 15)
    methods = ("lrp", "single", "one_removed", "attention", "gxi")
    for method in methods * 3:
        xmil.explain(model, x, method=method, target=1)
    return {m: best(lambda m=m: xmil.explain(model, x, method=m, target=1), device, 9) / one for m in methods}


def singles(n: int, device: str) -> dict[str, float]:
    """How many times faster `single` is than a loop, and how far the scores differ."""
    model, x, _ = setting("transmil", n, device)
    run = lambda: xmil.explain(model, x, method="single", target=1)  # noqa: E731
    loop = best(lambda: looped_singles(model, x), device, 1)
    scores = torch.from_numpy(run().scores)
    expected = looped_singles(model, x).softmax(-1)[:, 1].cpu()
    return {"times faster": loop / best(run, device, 3), "difference": float((scores - expected).abs().max())}


def against_dense(n: int, device: str) -> dict[str, float]:
    """How many times faster lrp is than with dense attention matrices, and how far the scores differ."""
    model, x, _ = setting("transmil", n, device)
    run = lambda: xmil.explain(model, x, target=1)  # noqa: E731
    with frozen(model):
        dense = dense_relevance(model, x, 1).cpu()
        slow = best(lambda: dense_relevance(model, x, 1), device, 1)
    scores = torch.from_numpy(run().scores)
    return {
        "times faster": slow / best(run, device, 3),
        "difference": float((scores - dense).abs().max() / dense.abs().max()),
    }


def _peak(name: str, n: int, method: str, queue: multiprocessing.Queue[float]) -> None:
    model, x, _ = setting(name, n, "cpu")
    xmil.explain(model, x, method=method, target=1)
    status = Path("/proc/self/status").read_text()  # getrusage's peak begins with that of the parent
    queue.put(next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1e6)


def peak_gb(name: str, n: int, method: str, device: str) -> float:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        model, x, _ = setting(name, n, device)
        xmil.explain(model, x, method=method, target=1)
        return torch.cuda.max_memory_allocated() / 1e9
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[float] = context.Queue()
    process = context.Process(target=_peak, args=(name, n, method, queue))
    process.start()
    process.join()
    return queue.get()


def mamba(sizes: Sequence[int], device: str) -> list[list[str]]:
    """MambaMIL at the sizes: in forward passes, and against TransMIL of the same width."""
    rows = []
    for n in sizes:
        (own, gb), (other, other_gb) = (
            (transformer(name, n, device, 2), peak_gb(name, n, "lrp", device))
            for name in ("mambamil", "transmil-512")
        )
        forward, lrp = (own["forward_s"] / other["forward_s"], own["lrp"] / other["lrp"])
        print(
            f"mambamil n={n:>9,}: forward {own['forward_s']:.3f} s; lrp {own['lrp']:.2f} forward passes, "
            f"peak {gb:.2f} GB; against transmil with dim 512: forward {forward:.2f}, "
            f"lrp {lrp * forward:.2f}, peak {other_gb:.2f} GB"
        )
        rows.append([f"MambaMIL `lrp`, {n:,} patches", f"{own['lrp']:.2f} forward passes", f"{gb:.2f} GB"])
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=[24_000, 100_000])
    parser.add_argument(
        "--new-sizes", action="store_true", help="as for slides of ever new sizes: no playback"
    )
    parser.add_argument("--record", metavar="FILE", help="write the table as a file of results")
    options = parser.parse_args(arguments)
    device = options.device
    rows = []
    if options.new_sizes:
        replay.SMALL_BYTES = 0
    totals = {}
    for n in options.sizes:
        repeats = 5 if n < 50_000 else 2
        t = transformer("transmil", n, device, repeats)
        totals[n] = t["forward_s"] * t["lrp"]
        gb = peak_gb("transmil", n, "lrp", device)
        print(
            f"transmil n={n:>9,}: forward {t['forward_s']:.4f} s "
            f"({t['torchs_s']:.4f} s with torch's attention); "
            f"lrp {t['lrp']:.2f} forward passes ({t['lrp'] * t['forward_s'] / t['torchs_s']:.2f}; "
            f"{t['unchecked']:.2f} with check=False), "
            f"peak {gb:.2f} GB; attention rollout {t['attention']:.2f} forward passes"
        )
        cost = f"{t['lrp']:.2f} forward passes of {t['forward_s']:.3g} s"
        rows.append([f"TransMIL `lrp`, {n:,} patches", cost, f"{gb:.2f} GB"])
    first = options.sizes[0]
    for n in options.sizes[1:]:
        print(f"transmil lrp: {n:,} instances cost {totals[n] / totals[first]:.2f} x {first:,}")
    rows += mamba(options.sizes, device)
    for n in (1_000, 10_000):
        costs = pooled(n, device)
        ratios = ", ".join(f"{m} {r:.2f}" for m, r in costs.items())
        print(f"attnmil n={n:,}, in forward passes: {ratios}")
        rows.append([f"AttnMIL `lrp`, {n:,} patches", f"{costs['lrp']:.2f} forward passes", ""])
    for name, found in (
        ("transmil single n=1,000 against a loop", singles(1000, device)),
        ("transmil lrp n=4,000 against dense attention", against_dense(4000, device)),
    ):
        figure = f"{found['times faster']:.1f} times faster, scores differ by {found['difference']:.1e}"
        print(f"{name}: {figure}")
        rows.append([name, figure, ""])
    if options.record:
        write_results(
            options.record,
            title="Speed and memory",
            question="What does an explanation cost, in forward passes of the same bag?",
            columns=["what", "figure", "peak memory"],
            rows=rows,
            machine=machine_name(device),
        )


if __name__ == "__main__":
    main()
