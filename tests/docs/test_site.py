"""The documentation site builds without a warning and holds what is made from the program."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import xmil
from tests.docs.pages import ROOT
from xmil.cli._app import command_panels
from xmil.cli._command import REQUESTS, flags_of
from xmil.core.request import options

LACKS = find_spec("mkdocs") is None or find_spec("mkdocstrings") is None
pytestmark = [pytest.mark.early, pytest.mark.skipif(LACKS, reason="pip install 'xmil[docs]'")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_command_is_described(site: Path) -> None:
    text = (site / "cli" / "index.html").read_text("utf-8")
    missing = [name for name in command_panels() if f'id="xmil-{name}"' not in text]
    assert missing == []
    for name in command_panels():
        import_module(f"xmil.cli.{name}")
    named = [(command, option) for command, request in REQUESTS.items() for option in options(request)]
    assert len(named) > 200
    for command, option in named:
        about = options(REQUESTS[command])[option]
        word = option if about.rare or about.argument else flags_of(REQUESTS[command])[option]
        assert word.lower() in text.lower(), f"{command}: {word}"


def test_every_public_name_is_described(site: Path) -> None:
    text = (site / "api" / "index.html").read_text("utf-8")
    missing = [name for name in xmil.__all__ if name != "__version__" and f'id="xmil.{name}"' not in text]
    assert missing == []


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text("utf-8")
        for part in text.split("<")[1:]:
            if part.startswith(("script", "img", 'link rel="stylesheet')):
                assert "://" not in part.split(">")[0], f"{page.name}: {part[:120]}"
