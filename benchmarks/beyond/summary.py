"""Tables from the rows of `benchmarks.beyond.everything`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

Row = dict[str, Any]


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Each study's figures, from the repetitions that are there."""
    good = [row for row in rows if "error" not in row]
    found: dict[str, Any] = {"failed": [row for row in rows if "error" in row]}
    keys = sorted({_key(row) for row in good if row["study"] != "train"})
    for key in keys:
        found[" ".join(key).strip()] = SUMMARIES[key[0]]([row for row in good if _key(row) == key])
    return found


def _key(row: Row) -> tuple[str, str, str]:
    return row["study"], row.get("model", row.get("course", "")), row.get("task", "")


def _means(rows: Sequence[Row], skip: Sequence[str] = ()) -> dict[str, Any]:
    """Mean and deviation over repetitions of each number."""
    names = [k for k, v in rows[0].items() if isinstance(v, float) and k not in (*skip, "at")]
    columns = {name: [row[name] for row in rows if isinstance(row.get(name), float)] for name in names}
    return {
        "repetitions": len(rows),
        **{
            name: [float(np.mean(v)), float(np.std(v, ddof=1)) if len(v) > 1 else 0.0]
            for name, v in columns.items()
        },
    }


def _against(rows: Sequence[Row], first: str, second: str) -> list[float]:
    """Mean difference and the p of a paired t-test over repetitions."""
    both = [(row[first], row[second]) for row in rows if first in row and second in row]
    if len(both) < 2:
        return []
    a, b = np.array(both).T
    return [float((a - b).mean()), float(stats.ttest_rel(a, b).pvalue)]


def _evidence(rows: Sequence[Row]) -> dict[str, Any]:
    changes = {
        "contexts - lrp": _against(rows, "contexts=24", "lrp"),
        "shapley - lrp": _against(rows, "shapley", "lrp, as shapley"),
    }
    return {**_means(rows), **changes}


def _partners(rows: Sequence[Row]) -> dict[str, Any]:
    bags = sum(row["bags"] for row in rows)
    against = {
        f"{name} - product of lrp": _against(rows, name, "product of lrp")
        for name in ("shapley interaction", "pair alone")
    }
    return {**_means(rows), "bags": bags, **against}


def _signs(rows: Sequence[Row]) -> dict[str, Any]:
    bags = np.array([row["bags"] for row in rows])
    right = float(np.average([row["right"] for row in rows], weights=bags))
    return {**_means(rows), "bags": int(bags.sum()), "right": right}


def _intervals(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        **{
            name: float(np.mean([row[name] for row in rows if name in row]))
            for name in ("shapley", "interactions")
            if name in rows[0]
        },
        "contexts": _coverage([one for row in rows for one in row["contexts"]]),
    }


def _coverage(found: Sequence[Row]) -> dict[str, Any]:
    return {
        count: {
            name: round(float(np.mean([one[count][name] for one in found if name in one[count]])), 4)
            for name in ("all", "interval", "strong", "seen", "miss")
        }
        for count in (found[0] if found else ())
    }


def _sets(rows: Sequence[Row]) -> dict[str, Any]:
    searches = [one for row in rows for one in row["searches"]]
    gaps = [one for row in rows for one in row.get("gaps", ())]
    return {
        "searches": len(searches),
        **{name: float(np.mean([one[name] for one in searches])) for name in ("equal", "enclosed", "any")},
        **{
            f"gaps, {n}": _sizes([one for one in gaps if one["n"] == n])
            for n in sorted({g["n"] for g in gaps})
        },
    }


def _sizes(found: Sequence[Row]) -> dict[str, Any]:
    """Sizes of minimal sets, the distance of their bounds, and plain greedy sets beside them."""
    some = [one for one in found if one["upper"] is not None]
    both = [one for one in some if one["greedy"] is not None]
    return {
        "bags": len(found),
        "with a set": len(some),
        "median size": float(np.median([one["upper"] for one in some])) if some else None,
        "median gap": float(np.median([(o["upper"] - o["lower"]) / o["upper"] for o in some]))
        if some
        else None,
        "greedy found none": len(some) - len(both),
        "larger than greedy": sum(one["upper"] > one["greedy"] for one in both),
        "smaller than greedy": sum(one["upper"] < one["greedy"] for one in both),
        "median greedy": float(np.median([one["greedy"] for one in both])) if both else None,
    }


def _colon(rows: Sequence[Row]) -> dict[str, Any]:
    return {
        **_means(rows),
        "contexts - lrp": _against(rows, "contexts=24", "lrp"),
        "shapley - lrp": _against(rows, "shapley", "lrp"),
        "intervals": _coverage([one for row in rows for one in row["contexts"]]),
        **({"sets": _sizes([s for row in rows for s in row["sets"]])} if "sets" in rows[0] else {}),
    }


SUMMARIES = {
    "evidence": _evidence,
    "partners": _partners,
    "one_hot": _partners,
    "flip_signs": _signs,
    "intervals": _intervals,
    "exhaustive_sets": _sets,
    "colon_run": _colon,
}
