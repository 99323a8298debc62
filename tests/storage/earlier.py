"""Folders as an earlier version left them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

from xmil.storage import read_ledger


def as_of_0_2(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Turn a finished run into one of xmil 0.2: a manifest, which does not know items, instead of the ledger.

    `without` are entries of run.json that it lacked.
    """
    ledger = read_ledger(folder)
    entries = [{"path": path, **entry} for path, entry in sorted(ledger.files.items()) if path != "run.json"]
    lines = [json.dumps({key: line[key] for key in line if key != "of"}) + "\n" for line in entries]
    digest = sha256("".join(lines).encode()).hexdigest()
    header = {"xmil": "manifest", "layout": 1, "files": len(lines), "sha256": digest}
    (folder / "manifest.jsonl").write_text("".join([json.dumps(header) + "\n", *lines]))
    (folder / "ledger.jsonl").unlink()
    about = json.loads((folder / "run.json").read_text())
    about = {key: value for key, value in about.items() if key not in (*without, "ledger", "warnings")}
    (folder / "run.json").write_text(json.dumps({**about, "layout": 2, "manifest": True}))
    return folder
