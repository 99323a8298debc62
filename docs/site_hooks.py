"""Pages that are made: the first from the README, the references from the program."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parent))
import layers_picture

ROOT = Path(__file__).parents[1]
MADE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
TITLES = {  # of the Python reference, in its order; other parts follow
    "methods": "Explain",
    "models": "Models",
    "data": "Feature files and cohorts",
    "evaluate": "Faithfulness and evidence",
    "core": "Nouns and errors",
}
PLAIN = ("LICENSE", "NOTICE", "CITATION.cff")  # files that are no pages: named, not linked


def on_files(files: Files, config: Any) -> Files:
    """Add the made pages."""
    for source, page in MADE.items():
        text = as_page((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "cli.md", content=command_reference()))
    files.append(File.generated(config, "api.md", content=python_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ into the root lead to the made pages; the imports are filled in."""
    if page.file.src_uri == "layers.md":
        markdown = markdown.replace(layers_picture.MARK, layers_picture.table())
    up = "../" * page.file.src_uri.count("/")
    for source, made in MADE.items():
        markdown = markdown.replace(f"](../{up}{source}", f"]({up}{made}")
    return markdown


def as_page(text: str) -> str:
    """A file of the root as a page: its links start in docs/."""
    text = text.replace("](docs/", "](")
    for source, made in MADE.items():
        text = text.replace(f"]({source}", f"]({made}")
    return re.sub(rf"\[([^\]]+)\]\((?:{'|'.join(PLAIN)})\)", r"\1", text)


def command_reference() -> str:
    """Every command with its options, as the program itself describes them."""
    import typer
    from typer.cli import get_docs_for_click

    from xmil.cli._app import build

    group = typer.main.get_command(build(every=True))
    with typer.Context(group, info_name="xmil") as context:
        text = get_docs_for_click(obj=group, ctx=context, name="xmil")
    for name, command in group.commands.items():  # the list of commands cuts their sentences short
        sentence = (command.help or "").split("\n\n")[0].replace("\n", " ")
        short = re.search(rf"^\* `{name}`: .*$", text, re.M)
        text = text.replace(short[0], f"* `{name}`: {sentence}", 1) if short else text
    text = text.replace("][", "]\\[")  # brackets of a usage text are no link
    return text.replace("# `xmil`", "# Commands", 1)


def python_reference() -> str:
    """Every public name of the package under the part that defines it; mkdocstrings fills in the rest."""
    import xmil

    lines = [
        "# Python",
        "",
        "`import xmil` is instant: each of these names is loaded when it is first used.",
        "",
    ]
    parts: dict[str, list[str]] = {}
    for name, module in xmil._HOME.items():
        parts.setdefault(module.split(".")[1], []).append(name)
    for part in (*TITLES, *sorted(set(parts) - set(TITLES))):
        lines += ["", f"## {TITLES.get(part, part.capitalize())}", ""]
        lines += [f"::: xmil.{name}" for name in parts.get(part, [])]
    return "\n".join(lines) + "\n"
