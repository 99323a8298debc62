"""The built page: the files of one folder, found by listing it, never by a path from outside."""

from __future__ import annotations

from pathlib import Path

STATIC = Path(__file__).parent / "static"
NOT_BUILT = (
    "The viewer's page is not built; install the package (pip install .), or build it in a checkout: "
    "npm --prefix page ci && npm --prefix page run build"
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpeg": "image/jpeg",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}


def page_files(folder: Path = STATIC) -> dict[str, Path]:
    """The page's files by their address below the page; empty where it is not built."""
    if not (folder / "index.html").is_file():
        return {}
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {path.relative_to(folder).as_posix(): path for path in files}


def content_type(name: str) -> str:
    """The media type of a file of the page."""
    return TYPES.get(Path(name).suffix.lower(), "application/octet-stream")
