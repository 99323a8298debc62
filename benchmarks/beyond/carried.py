"""Studies of the models of a packed file, on one device: `python -m benchmarks.beyond.carried --help`.

    python -m benchmarks.beyond.carried --packed FILE --out DIR --device cuda --workers 8 --minutes 5

Rows go to DIR/rows.jsonl as they come; DIR/summary.json is made of what there is at the end or when time
is up.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import xmil
from benchmarks.beyond import errors, pairs, sets, table
from benchmarks.beyond.packed import Entry, Packed, opened, read
from benchmarks.beyond.summary import summary
from xmil import explain_classes
from xmil.bench import TASKS, MethodSpec, score_bags

COLON = ("epithelial", "balance")
Row = dict[str, Any]


def main() -> None:
    asked = _arguments()
    asked.out.mkdir(parents=True, exist_ok=True)
    wanted = asked.studies.split(",")
    jobs = [
        (name, i) for name in STUDIES if name in wanted for i in _which(name, read(asked.packed), asked.only)
    ]
    pool = ProcessPoolExecutor(asked.workers, mp_context=get_context("spawn"))
    how = (str(asked.packed), asked.device, asked.small, asked.orders)
    with (asked.out / "rows.jsonl").open("a") as stream:
        _collect({pool.submit(measure, name, i, *how): (name, i) for name, i in jobs}, stream, asked.minutes)
    rows = [json.loads(line) for line in (asked.out / "rows.jsonl").read_text().splitlines()]
    found = json.dumps(summary(rows), indent=1)
    (asked.out / "summary.json").write_text(found)
    print(found, flush=True)
    for process in active_children():  # what still runs when the minutes are over is not waited for
        process.terminate()
    os._exit(0)


def _collect(jobs: dict[Future[Row], tuple[str, int]], stream: Any, minutes: float) -> None:
    started = time.monotonic()
    while jobs and (left := started + 60 * minutes - time.monotonic()) > 0:
        for future in wait(jobs, timeout=left, return_when=FIRST_COMPLETED).done:
            name, i = jobs.pop(future)
            error = future.exception()
            row = (
                future.result() if error is None else {"study": name, "entry": i, "error": repr(error)[:500]}
            )
            row["at"] = round(time.monotonic() - started, 1)
            print(name, i, row.get("error", ""), row["at"], flush=True)
            print(json.dumps(row), file=stream, flush=True)


def measure(name: str, i: int, packed: str, device: str, small: bool, orders: int) -> Row:
    """One study of one model."""
    torch.set_num_threads(1)
    one = opened(_entries(packed)[i], device)
    more = {"orders": orders} if name == "colon_run" else {}
    return {"study": name, **one.about, **STUDIES[name](one, small=small, **more)}


@cache
def _entries(path: str) -> list[Entry]:
    return read(Path(path))


def evidence(one: Packed, *, small: bool) -> Row:
    """AUPRC-2 of LRP, of contexts and of Shapley values, as in Table 1."""
    count = 2 if small else len(one.bags)
    x, spec = torch.stack(one.bags[:count]), MethodSpec("lrp")
    truth = torch.from_numpy(TASKS[one.about["task"]].evidence(np.stack(one.truth[:count])))
    shapley = [_of_classes(one, bag, orders=4 if small else 200) for bag in x]
    ways: dict[str, Tensor] = {
        "lrp": score_bags(one.model, x, spec).cpu(),
        "contexts=24": table.in_contexts(one.model, x, spec, seed=one.about["repetition"]),
        "shapley": torch.from_numpy(np.array(shapley)),
    }
    found = {name: table.auprc2(truth, scores) for name, scores in ways.items()}
    return {**found, "lrp, as shapley": found["lrp"], "bags": count}


def _of_classes(one: Packed, bag: Tensor, *, orders: int) -> list[Any]:
    every = explain_classes(one.model, bag, method="shapley", precision=None, permutations=orders)
    return [e.scores for e in every]


def partners(one: Packed, *, small: bool) -> Row:
    """AP of true partners among all pairs of bags of 30, sampled."""
    chosen, draws = (one.positive[:1], 24) if small else (one.positive, 200)
    found = [pairs.precisions(one.model, x, codes, draws=draws) for x, codes in chosen]
    means = {name: float(np.mean([each[name] for each in found])) for name in found[0]}
    return {"bags": len(found), "each": found, "draws": draws, **means}


def exhaustive_sets(one: Packed, *, small: bool) -> Row:
    """Minimal sets of bags of 15 against all subsets."""
    n, searches = (8 if small else 15), []
    for x in one.bags[: 2 if small else 10]:
        for kind, size in sets.exhaustive(one.model, x[:n]).items():
            found = xmil.minimal_set(one.model, x[:n], kind=kind)
            enclosed = found.lower <= (size or n) <= (found.upper or n)
            searches.append({"equal": found.upper == size, "enclosed": enclosed, "any": size is not None})
    return {"searches": searches}


def colon_run(one: Packed, *, small: bool, orders: int) -> Row:
    """AUPRC-2 on the nuclei of a fold's images."""
    orders = 4 if small else orders
    ways: dict[str, Row] = {
        "lrp": {"method": "lrp"},
        "contexts=24": {"method": "lrp", "contexts": 24},
        "shapley": {"method": "shapley", "permutations": orders, "precision": None},
    }
    scores: dict[str, list[float]] = {name: [] for name in ways}
    for x, truth in [*zip(one.bags, one.truth, strict=True)][: 1 if small else None]:
        for name, how in ways.items():
            scores[name].append(xmil.auprc2(truth, xmil.explain(one.model, x, target=1, **how).scores))
    return {
        "bags": len(scores["lrp"]), "orders": orders, "contexts": [],
        **{name: float(np.mean(values)) for name, values in scores.items()},
    }  # fmt: skip


def intervals(one: Packed, *, small: bool) -> Row:
    """How often intervals of contexts hold the mean over very many sub-bags."""
    long, seeds = (50, 2) if small else (1000, 5) if one.about["task"] in COLON else (4000, 10)
    middling = sorted(one.bags, key=lambda x: abs(len(x) - 150))[:2]
    how: Row = {"seeds": seeds, "counts": (24,) if small else (24, 48, 96), "long": long}
    row: Row = {"contexts": [found for x in middling for found in errors.coverage(one.model, x, **how)]}
    if (one.about["model"], one.about["task"]) == ("attnmil", "adjacent_pairs"):
        row["interactions"] = errors.interactions(one.model, one.bags[0][: 9 if small else 14], 5)
    return row


STUDIES: dict[str, Callable[..., Row]] = {
    "partners": partners,
    "evidence": evidence,
    "exhaustive_sets": exhaustive_sets,
    "colon_run": colon_run,
    "intervals": intervals,
}


def _which(study: str, entries: Sequence[Entry], only: str) -> list[int]:
    """The entries of a file that a study takes."""
    kinds = {
        "partners": lambda e: bool(e["positive"]),
        "evidence": lambda e: e["task"] not in COLON,
        "exhaustive_sets": lambda e: (e["model"], e["task"]) == ("transmil", "pos_neg_count"),
        "colon_run": lambda e: e["task"] in COLON,
        "intervals": lambda e: e["task"] in (*COLON, "adjacent_pairs"),
    }
    return [
        i
        for i, entry in enumerate(entries)
        if kinds[study](entry) and only in f"{entry['model']} {entry['task']}"
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packed", type=Path, required=True, help="a file of `benchmarks.beyond.packed`")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--studies", default=",".join(STUDIES), help="by default all of them")
    parser.add_argument("--only", default="", help="part of a model's or task's name")
    parser.add_argument("--orders", type=int, default=50, help="of Shapley values on colon")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--small", action="store_true", help="hardly anything, to see that it runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
