"""Tables of the study: settings chosen on the other folds, intervals over images."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from benchmarks.inside.pictures import FOLDS

DRAWS = 4000


def chosen(rows: pd.DataFrame, group: str) -> pd.DataFrame:
    """One row per tile: that of the setting of `group` that did best on the other folds."""
    mine = rows[rows["map"].isin(group.split("|"))]
    mine = mine.assign(variant=mine["map"] + ": " + mine["variant"].fillna("").astype(str))
    parts = []
    for fold in range(FOLDS):
        others = mine[mine["fold"] != fold].groupby("variant")["auroc"].mean()
        if len(others):
            parts.append(mine[(mine["fold"] == fold) & (mine["variant"] == others.idxmax())])
    return pd.concat(parts).set_index(["image", "tile"]).sort_index()


def interval(values: pd.Series, *, seed: int = 0) -> tuple[float, float, float]:
    """The mean over tiles, with bounds from drawing whole images with replacement."""
    groups = values.groupby(level="image")
    sums, counts = groups.sum().to_numpy(), groups.count().to_numpy()
    rows = np.random.default_rng(seed).integers(0, len(sums), size=(DRAWS, len(sums)))
    means = sums[rows].sum(axis=1) / counts[rows].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def shown(found: tuple[float, float, float], *, sign: bool = False) -> str:
    """A mean with its bounds."""
    form = "+.3f" if sign else ".3f"
    return f"{found[0]:{form}} [{found[1]:{form}}, {found[2]:{form}}]"


def tell(rows: pd.DataFrame) -> str:
    """The tables of one encoder."""
    bags = rows[rows["map"] == "bag"]
    maps = rows[~rows["map"].isin(["bag", "redrawn encoder", "redrawn model"])]
    maps = maps.assign(between=maps["insertion"] - maps["deletion"])
    names = list(dict.fromkeys(maps["map"]))
    held = {name: chosen(maps, name) for name in names}
    held["best by other folds"] = chosen(maps, "|".join(name for name in names if name != "random"))
    best = max((name for name in held if name != "random"), key=lambda name: held[name]["auroc"].mean())
    each = [roc_auc_score(part["auroc"], part["score"]) for _, part in bags.groupby("fold")]
    tiles, count = len(held["tokens"]), held["tokens"].index.get_level_values("image").nunique()
    lines = [
        f"{tiles} tiles of {count} images; bag AUROC per fold "
        f"{', '.join(f'{value:.3f}' for value in each)} (mean {np.mean(each):.3f}); best row: {best}",
        "",
        "| map | AUROC at nuclei | minus occlusion | minus best row | deletion minus random "
        "| insertion minus random | insertion - deletion, minus random | passes | ms "
        "| |sum + constant - score| / score | settings chosen |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, mine in held.items():
        lines.append(_line(name, mine, held, best))
    lines += ["", *_redrawn(rows), "", *_all_settings(maps)]
    return "\n".join(lines)


def _line(name: str, mine: pd.DataFrame, held: dict[str, pd.DataFrame], best: str) -> str:
    def against(other: str, measure: str) -> str:
        return shown(interval(mine[measure] - held[other][measure]), sign=True)

    settings = Counter(mine.groupby("fold")["variant"].first().str.partition(": ")[2]).most_common()
    if name.startswith("best"):
        settings = Counter(mine.groupby("fold")["variant"].first()).most_common()
    cells = [
        name,
        shown(interval(mine["auroc"])),
        against("occlusion", "auroc"),
        against(best, "auroc"),
        against("random", "deletion"),
        against("random", "insertion"),
        against("random", "between"),
        f"{mine['passes'].median():.0f}",
        f"{1e3 * mine['seconds'].median():.0f}",
        f"{mine['error'].max():.1e}" if "error" in mine and mine["error"].notna().any() else "",
        "; ".join(f"{text} ({n})" for text, n in settings if text.strip()),
    ]
    return "| " + " | ".join(cells) + " |"


def _redrawn(rows: pd.DataFrame) -> list[str]:
    lines = []
    for what in ("encoder", "model"):
        drawn = rows[rows["map"] == f"redrawn {what}"]
        if len(drawn):
            values = drawn.set_index(["image", "tile"])["spearman"]
            empty = int(drawn["refused"].notna().sum()) if "refused" in drawn else 0
            lines.append(
                f"tokens under redrawn weights of the {what}: mean Spearman "
                f"{shown(interval(values), sign=True)}, mean of |Spearman| {values.abs().mean():.3f}, "
                f"{len(values)} draws x tiles, {empty} without a map"
            )
    return lines


def _all_settings(maps: pd.DataFrame) -> list[str]:
    """Every setting on all folds, to see and not to choose by."""
    lines = ["| map | setting | AUROC, all folds | refused |", "|---|---|---|---|"]
    for (name, variant), part in maps.assign(variant=maps["variant"].fillna("")).groupby(
        ["map", "variant"], sort=False
    ):
        refused = int(part["refused"].notna().sum()) if "refused" in part else 0
        lines.append(f"| {name} | {variant} | {part['auroc'].mean():.3f} | {refused} |")
    return lines


def main(path: Path) -> None:
    """Print the tables of a file of rows."""
    rows = pd.read_csv(path)
    for encoder, part in rows.groupby("encoder", sort=False):
        print(f"\n## {encoder}\n\n{tell(part)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
