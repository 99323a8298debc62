"""The lowest versions that xmil declares, as pins for pip: `python -m release.lowest > lowest.txt`.

A bound `name>=1.2` gives `name==1.2`, so every bound must name a version that exists. Torch and torchvision,
whose versions go in pairs, and the tools of the tests keep the versions of constraints.txt. Requirements on
the command line take the place of pins: `python -m release.lowest torch==2.11.0 torchvision==0.26.0`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
AS_TODAY = ("torch", "torchvision")
TOOLS = ("expecttest", "httpx", "hypothesis", "pytest", "pytest-xdist", "shapely", "zennit")
NOT_TRIED = ("dev", "docs")  # extras of developers


def bounds() -> dict[str, str]:
    """The declared lower bound of each direct dependency, those of the users' extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"]]
    lines += [line for name, own in extras.items() if name not in NOT_TRIED for line in own]
    lowest: dict[str, str] = {}
    for line in lines:
        matched = re.fullmatch(r"([\w-]+)>=([\d.]+)", line)
        if matched is None or lowest.get(matched[1], matched[2]) != matched[2]:
            raise SystemExit(f"{line!r} in pyproject.toml must be name>=version, the same in every extra.")
        lowest[matched[1]] = matched[2]
    return lowest


def constraints() -> dict[str, str]:
    """The versions of constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


def pins(*others: str) -> list[str]:
    """One requirement per line for pip; the others take the place of pins of the same name."""
    today = constraints()
    chosen = bounds() | {name: today[name] for name in AS_TODAY + TOOLS}
    chosen |= {name: version for name, _, version in (other.partition("==") for other in others)}
    return [f"{name}=={version}" for name, version in sorted(chosen.items())]


if __name__ == "__main__":
    print("\n".join(pins(*sys.argv[1:])))
