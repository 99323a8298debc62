"""The software bill of materials, CycloneDX 1.5: `python -m release.bill --out dist/xmil.cdx.json`.

It lists what `pip` installed for xmil and its extras, as far as the environment has it, and what the viewer's
page was built from. The same environment gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.bundle import EXTRAS

LOCK = Path(__file__).parents[1] / "page" / "package-lock.json"


def installed(root: str, extras: frozenset[str]) -> dict[str, Distribution]:
    """A distribution and all that it requires, by canonical name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [(root, extras)]
    while waiting:
        name, wanted = waiting.pop()
        key = canonicalize_name(name)
        if (key, wanted) in seen:
            continue
        seen.add((key, wanted))
        try:
            found[key] = distribution(name)
        except PackageNotFoundError:
            continue
        for line in found[key].requires or []:
            need = Requirement(line)
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in (wanted or {""})):
                waiting.append((need.name, frozenset(need.extras)))
    return found


def component(found: Distribution) -> dict[str, Any]:
    """A Python package as CycloneDX has it."""
    name, version = canonicalize_name(str(found.metadata["Name"])), found.version
    made: dict[str, Any] = {"type": "library", "name": name, "version": version}
    made |= {"purl": f"pkg:pypi/{name}@{version}", "bom-ref": f"pkg:pypi/{name}@{version}"}
    words = str(found.metadata.get("License-Expression") or "").strip()
    return {**made, **({"licenses": [{"expression": words}]} if words else {})}


def page_components(lock: Path) -> list[dict[str, Any]]:
    """The packages that the page was built from, with their hashes, from npm's lock file."""
    held = json.loads(lock.read_text(encoding="utf-8"))["packages"] if lock.is_file() else {}
    made = []
    for path, about in held.items():
        if path:
            name, version = path.rpartition("node_modules/")[2], about["version"]
            purl = f"pkg:npm/{name.replace('@', '%40')}@{version}"
            scope = "excluded" if about.get("dev") else "required"
            made.append({"type": "library", "name": name, "version": version, "purl": purl, "scope": scope})
            made[-1]["bom-ref"] = f"{purl}#{path}"
            if str(about.get("integrity", "")).startswith("sha512-"):
                made[-1]["hashes"] = [_sha512(about["integrity"])]
    return made


def _sha512(integrity: str) -> dict[str, str]:
    from base64 import b64decode

    return {"alg": "SHA-512", "content": b64decode(integrity.removeprefix("sha512-")).hex()}


def bill(extras: frozenset[str]) -> dict[str, Any]:
    """The whole document."""
    packages = installed("xmil", extras)
    own = packages.pop("xmil")
    parts = [component(found) for found in packages.values()] + page_components(LOCK)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**component(own), "type": "application"}},
        "components": sorted(parts, key=lambda part: str(part["bom-ref"])),
    }


def main() -> None:
    """Write the bill."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--extras", default=EXTRAS)
    args = parser.parse_args()
    made = bill(frozenset(args.extras.split(",")))
    args.out.write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{args.out}: {len(made['components'])} components")


if __name__ == "__main__":
    main()
