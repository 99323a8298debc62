"""Which models LRP and the other methods explain, as a dated table: `python -m benchmarks.zoo`.

Our own models, torchmil's from their package, and the operation patterns of the field's models.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tests.zoo import patterns, torchmil_models
from torch import Tensor, nn

import xmil

METHODS = ("lrp", "gxi", "ig", "single", "one_removed")
NEEDS = {"adj": "`adjacency`", "coords": "`coords`", "mask": "a mask of ones"}


@dataclass(frozen=True)
class Row:
    """A model to try, and what it needs beside features."""

    name: str
    source: str
    build: Callable[[], tuple[nn.Module, Callable[..., Tensor] | None]]
    bag: Tensor | xmil.Bag
    needs: str = ""


def rows() -> Iterator[Row]:
    """Every model that can be imported here."""
    ours = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    for name in xmil.list_models():
        yield Row(name, f"xmil {xmil.__version__}", lambda name=name: (_ours(name), None), ours)  # type: ignore[misc]
    try:
        version = importlib.metadata.version("torchmil")
    except importlib.metadata.PackageNotFoundError:
        version = None
    for name, (_, _, companion) in torchmil_models.TORCHMIL.items() if version else ():
        build = lambda name=name: torchmil_models.build(name)  # noqa: E731
        yield Row(name, f"torchmil {version}", build, torchmil_models.bag(), NEEDS.get(companion or "", ""))
    for name, make in patterns.PATTERNS.items():
        build = lambda make=make: (make().eval(), patterns.logits_of)  # noqa: E731
        yield Row(name, "pattern", build, ours[:12, : patterns.WIDTH])


def _ours(name: str) -> nn.Module:
    return xmil.create_model(name, in_dim=16, n_classes=2, seed=0)


def tried(row: Row) -> dict[str, Any]:
    """Runs or the reason why not, the account, and the methods that gave scores."""
    net, forward = row.build()
    found: dict[str, Any] = {"runs": "yes", "account": "", "methods": []}
    for method in METHODS:
        extra = {"preset": "exact"} if method == "lrp" else {}
        try:
            e = xmil.explain(net, row.bag, method=method, target=1, forward=forward, **extra)
        except xmil.XmilError as error:
            if method == "lrp":
                found["runs"] = str(error).split(". ")[0]
            continue
        found["methods"].append(method)
        if e.audit is not None and method == "lrp":
            found["account"] = f"{abs(e.audit.other) / abs(e.output):.0e}"
            found["runs"] = "yes, random" if any("random" in line for line in e.warnings) else "yes"
    return found


def main() -> None:
    """Print the table as Markdown."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{datetime.datetime.now(tz=datetime.UTC):%d %B %Y}, torch {torch.__version__}.\n")
    print("| model | source | runs | open part | methods | needs |\n|---|---|---|---|---|---|")
    ran = total = 0
    for row in rows():
        found = tried(row)
        ran, total = ran + found["runs"].startswith("yes"), total + 1
        methods = "all" if len(found["methods"]) == len(METHODS) else ", ".join(found["methods"])
        cells = (row.name, row.source, found["runs"], found["account"], methods, row.needs)
        print(f"| {' | '.join(cells)} |")
    print(f"\n{ran} of {total} run.")


if __name__ == "__main__":
    main()
