"""The picture of the layers, from the import contract and the code; run as a script, it is written anew.

The documentation's build fills the table of imports in; `tests/test_tree.py` checks the picture.
"""

from __future__ import annotations

import ast
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PICTURE = ROOT / "src" / "xmil", Path(__file__).with_name("layers.svg")
WIDTH, ROW, GAP, MARK = 960, 58, 10, "<!-- imports -->"


def layers(pyproject: Path = ROOT / "pyproject.toml") -> list[list[str]]:
    """The packages of each layer, the highest first, as the import contract has them."""
    contracts = tomllib.loads(pyproject.read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    held = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip(" ()") for name in row.split("|")] for row in held]


def purpose(package: str) -> str:
    """What a package says of itself: the first clause of its docstring."""
    text = ast.get_docstring(ast.parse((SOURCE / package / "__init__.py").read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0].split(":")[0].split(";")[0].split(". ")[0].rstrip(".").replace("`", "")


def imports() -> dict[str, list[str]]:
    """The packages that each package imports, at any depth of its code."""
    names = [name for row in layers() for name in row]
    found = {name: set[str]() for name in names}
    for name in names:
        for path in sorted((SOURCE / name).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                used = module.split(".")[1] if module.startswith("xmil.") else ""
                found[name] |= {used} & set(names) - {name}
    return {name: [used for used in names if used in found[name]] for name in names}


def picture() -> str:
    """The layers as SVG, the highest on top."""
    rows = layers()
    height = len(rows) * (ROW + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'font-family="system-ui, sans-serif">',
        "<title>The packages of xmil by layer; a lower one never imports a higher one</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for i, row in enumerate(rows):
        y, width = GAP + i * (ROW + GAP), (WIDTH - GAP) / len(row) - GAP
        for j, name in enumerate(row):
            parts += _box(GAP + j * (width + GAP), y, width, name)
    return "\n".join([*parts, "</svg>", ""])


def _box(x: float, y: float, width: float, name: str) -> list[str]:
    room = int(width / 6.2)
    said = purpose(name)
    shown = said if len(said) <= room else said[: said.rfind(" ", 0, room)] + " …"
    edges = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}"'
    text = f'<text x="{x + width / 2:.1f}" text-anchor="middle"'
    return [
        f'<rect {edges} rx="6" fill="#eef3f8" stroke="#0072B2"/>',
        f'{text} y="{y + 24}" font-size="16" font-weight="600">{name}</text>',
        f'{text} y="{y + 44}" font-size="12" fill="#444">{escape(shown)}</text>',
    ]


def table() -> str:
    """Who imports whom, as Markdown."""
    pairs = [(name, ", ".join(f"`{one}`" for one in used)) for name, used in imports().items()]
    rows = [f"| `{name}` | {used or 'none of the others'} |" for name, used in pairs]
    return "\n".join(["| package | imports |", "|---|---|", *rows])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
