"""Tables of the study: settings chosen on the other folds, intervals over images."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.metrics import roc_auc_score

from benchmarks.inside.curves import FILLS
from benchmarks.inside.pictures import FOLDS

DRAWS = 4000
TILE = ["seed", "image", "tile"]
FAMILY = ("tokens", "turned")  # the default is one of these, with one setting for all encoders
UNSEEN = (2, 3, 4)  # folds that nobody looked at before the maps were written
NOT_MAPS = ("bag", "redrawn encoder", "redrawn model")
NULLS = ("random", "scattered")
Interval = tuple[float, float, float]


def best_elsewhere(maps: pd.DataFrame) -> dict[int, str]:
    """Per fold the setting with the highest mean over the other folds, encoders weighing alike."""
    found = {}
    for fold in range(FOLDS):
        others = maps[maps["fold"] != fold].groupby(["encoder", "variant"])["auroc"].mean()
        means = others.groupby("variant").mean()
        if len(means):
            found[fold] = str(means.idxmax())
    return found


def picked(maps: pd.DataFrame, choice: dict[int, str]) -> pd.DataFrame:
    """One row per tile: that of the setting chosen for its fold."""
    parts = [maps[(maps["fold"] == fold) & (maps["variant"] == name)] for fold, name in choice.items()]
    return pd.concat(parts).set_index(TILE).sort_index()


def interval(values: pd.Series, *, seed: int = 0) -> Interval:
    """The mean over tiles, with bounds from drawing whole images with replacement."""
    values = values.dropna()
    if not len(values):
        return float("nan"), float("nan"), float("nan")
    groups = values.groupby(level="image")
    sums, counts = groups.sum().to_numpy(), groups.count().to_numpy()
    rows = np.random.default_rng(seed).integers(0, len(sums), size=(DRAWS, len(sums)))
    means = sums[rows].sum(axis=1) / counts[rows].sum(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def shown(found: Interval, *, sign: bool = False, digits: int = 3) -> str:
    """A mean with its bounds."""
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{found[0]:{form}} [{found[1]:{form}}, {found[2]:{form}}]"


def held_maps(maps: pd.DataFrame, default: dict[int, str]) -> dict[str, pd.DataFrame]:
    """Per map one row per tile; the default's setting is that of all encoders, others choose for this one."""
    held = {"default": picked(maps, default)}
    for name in dict.fromkeys(maps["map"]):
        mine = maps[maps["map"] == name]
        held[name] = picked(mine, best_elsewhere(mine))
    return held


def pooled(rows: pd.DataFrame, default: dict[int, str], folds: Sequence[int]) -> pd.Series:
    """The default's gain over occlusion on the tiles of all encoders, in these folds."""
    gains = []
    for _, part in rows[~rows["map"].isin(NOT_MAPS)].groupby("encoder", sort=False):
        held = held_maps(part, default)
        gain = held["default"]["auroc"] - held["occlusion"]["auroc"]
        gains.append(gain[held["default"]["fold"].isin(folds)])
    return pd.concat(gains)


def tell(rows: pd.DataFrame, default: dict[int, str]) -> str:
    """The tables of one encoder."""
    bags, maps = rows[rows["map"] == "bag"], rows[~rows["map"].isin(NOT_MAPS)]
    held = held_maps(maps, default)
    rivals = [name for name in held if name not in ("default", "dark", *NULLS)]
    best = max(rivals, key=lambda name: held[name]["auroc"].mean())
    each = [roc_auc_score(part["auroc"], part["score"]) for _, part in bags.groupby(["seed", "fold"])]
    count = held["default"].index.get_level_values("image").nunique()
    lines = [
        f"{len(held['default'])} tiles of {count} images; bag AUROC {np.mean(each):.3f} (lowest of "
        f"{len(each)} models {min(each):.3f}); best row: {best}",
        "",
        "| map | AUROC at nuclei | minus occlusion | minus the best row | AUROC, minus occlusion: folds "
        f"{UNSEEN} | passes | ms | error | median constant | settings chosen (folds) |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_line(name, held, best) for name in held),
        "",
        *_curves(held),
        "",
        *_redrawn(rows),
        "",
        *_all_settings(maps),
    ]
    return "\n".join(lines)


def _line(name: str, held: dict[str, pd.DataFrame], best: str) -> str:
    mine = held[name]
    gain, gap = (mine["auroc"] - held[other]["auroc"] for other in ("occlusion", best))
    unseen = mine["fold"].isin(UNSEEN)
    settings = Counter(mine.groupby("fold")["variant"].first()).most_common()
    accounted = "error" in mine and mine["error"].notna().any()
    cells = [
        name,
        shown(interval(mine["auroc"])),
        shown(interval(gain), sign=True),
        shown(interval(gap), sign=True),
        f"{mine['auroc'][unseen].mean():.3f}, {shown(interval(gain[unseen]), sign=True)}",
        f"{mine['passes'].median():.0f}",
        f"{1e3 * mine['seconds'].median():.0f}",
        f"{mine['error'].max():.1e}" if accounted else "",
        f"{mine['constant'].abs().median():.2f}" if accounted else "",
        "; ".join(f"{text} ({n})" for text, n in settings),
    ]
    return "| " + " | ".join(cells) + " |"


def _curves(held: dict[str, pd.DataFrame]) -> list[str]:
    """Deletion (lower is better) and insertion (higher), against misplaced maps, noise and single squares."""
    if not any(column.startswith("patch ") for column in held["default"]):
        return []
    lines = ["| map | score | fill | curve | mean | minus misplaced | minus noise | minus single squares |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for name, mine in held.items():
        for what in ("patch", "slide"):
            for fill in (fill for fill in FILLS if f"{what} {fill} deletion" in mine):
                for kind in ("deletion", "insertion"):
                    curve = f"{what} {fill} {kind}"
                    against = [mine[f"{curve} misplaced"], *(held[null][curve] for null in NULLS)]
                    cells = [shown(interval(mine[curve] - other), sign=True, digits=2) for other in against]
                    told = [name, what, fill, kind, f"{mine[curve].mean():.2f}", *cells]
                    lines.append(f"| {' | '.join(told)} |")
    return [*lines, "", *_faults(held)]


def fault(mine: pd.DataFrame, curve: str, empty: str) -> pd.Series:
    """How far a null's curve lies below the straight line from the whole tile (1) to the empty one."""
    return (1 + mine[empty]) / 2 - mine[curve]


def _faults(held: dict[str, pd.DataFrame]) -> list[str]:
    """What a fill costs by itself: zero where pixels give way without a trace."""
    lines = ["| null | fill | deletion below the line | insertion below the line |", "|---|---|---|---|"]
    for name in NULLS:
        for fill in (fill for fill in FILLS if f"patch {fill} empty" in held[name]):
            found = (
                fault(held[name], f"patch {fill} {kind}", f"patch {fill} empty")
                for kind in ("deletion", "insertion")
            )
            cells = [shown(interval(each), sign=True, digits=2) for each in found]
            lines.append(f"| {name} | {fill} | {' | '.join(cells)} |")
    return lines


def _redrawn(rows: pd.DataFrame) -> list[str]:
    lines = []
    drawn = rows[rows["map"].str.startswith("redrawn")]
    for variant, part in drawn.groupby("variant", sort=False):
        values = part.set_index(TILE)["spearman"]
        empty = int(part["refused"].notna().sum()) if "refused" in part else 0
        lines.append(
            f"{variant} under redrawn weights: mean Spearman {shown(interval(values), sign=True)}, mean of "
            f"|Spearman| {values.abs().mean():.3f}, {len(values)} draws x tiles, {empty} without a map"
        )
    return lines


def _all_settings(maps: pd.DataFrame) -> list[str]:
    """Every setting on all folds, to see and not to choose by."""
    lines = ["| setting | AUROC, all folds | refused |", "|---|---|---|"]
    for variant, part in maps.groupby("variant", sort=False):
        refused = int(part["refused"].notna().sum()) if "refused" in part else 0
        lines.append(f"| {variant} | {part['auroc'].mean():.3f} | {refused} |")
    return lines


def main(path: Path) -> None:
    """Print the choice of the default and the tables of a file of rows."""
    rows = pd.read_csv(path, low_memory=False)
    rows["variant"] = rows["map"] + ": " + rows["variant"].fillna("").astype(str)
    default = best_elsewhere(rows[rows["map"].isin(FAMILY)])
    print("default by fold, chosen on the others:", default)
    for folds in (range(FOLDS), UNSEEN):
        gain = shown(interval(pooled(rows, default, folds)), sign=True)
        print(f"default minus occlusion, all encoders, folds {tuple(folds)}: {gain}")
    for encoder, part in rows.groupby("encoder", sort=False):
        print(f"\n## {encoder}\n\n{tell(part, default)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
