"""The pages of README and docs, their code blocks and command lines."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A block that cannot run carries its reason on the line above: <!-- not run: needs a cluster -->
_BLOCK = re.compile(r"(?:<!-- not run: ?(.*?) ?-->\n+)?^( *)```(\w*)[^\n]*\n(.*?)^\2```", re.M | re.S)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.M)
_INLINE = re.compile(r"`(xmil [^`\n]+|python -m [^`\n]+)`")
_SHELLS = ("sh", "bash", "console", "", "snakemake", "nextflow")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, code, first line in the file, and why it is not run, where it is not."""

    page: Path
    language: str
    code: str
    line: int
    not_run: str | None


def page_name(page: Path) -> str:
    """A page by its path in the repository."""
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = page.read_text("utf-8")
    return [
        Block(page, found[3], _dedent(found[4], found[2]), text.count("\n", 0, found.start(4)) + 1, found[1])
        for found in _BLOCK.finditer(text)
    ]


def command_lines(page: Path) -> Iterator[list[str]]:
    """The words of each `xmil ...` and `python -m ...` line in the shell and workflow blocks of a page."""
    text = page.read_text("utf-8")
    shells = [block.code for block in blocks(page) if block.language in _SHELLS]
    shells += [found[0] for found in _INDENTED.finditer(_BLOCK.sub("", text))]
    for shell in shells:
        for line in shell.replace("\\\n", " ").splitlines():
            yield from _commands(line)


def inline_commands(page: Path) -> list[str]:
    """Commands within a sentence, such as `xmil split --folds 5`; they may be cut short."""
    return _INLINE.findall(_BLOCK.sub("", page.read_text("utf-8")))


def _commands(line: str) -> Iterator[list[str]]:
    line = re.sub(r"^\s*\$ ", "", line)
    if not re.match(r"\s*(?:[A-Z_]+=\S+ +)*(xmil|python -m) ", line):
        return
    for part in re.split(r"\s(?:&&|\|\||;|\|)\s", line):
        words = [word for word in shlex.split(part, comments=True) if word != "..."]
        words = words[: next((i for i, word in enumerate(words) if re.match(r"\d?>|&$", word)), None)]
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words and words[0] in ("xmil", "python"):
            yield words


def _dedent(code: str, indent: str) -> str:
    return "\n".join(line.removeprefix(indent) for line in code.split("\n"))
