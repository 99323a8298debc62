"""`xmil verify`: is a run whole, and is it of the inputs that are there now?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Annotated

import typer

from xmil.core.errors import XmilError


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a run, of any command.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check every file of a run; of scores also digests, accounts, settings, models and features."""
    from xmil.core.text import counted
    from xmil.runs.verify import SCORED, run_files, verify_run
    from xmil.storage import open_run

    stored = open_run(run)
    faults, files = verify_run(stored), len(run_files(stored))
    slides, lost = _count(lambda: stored.slides), _count(lambda: stored.failed)
    if as_json:
        about = {"kind": stored.kind, "slides": slides, "files": files}
        print(json.dumps({**about, "faults": [vars(fault) for fault in faults]}, indent=2))
    else:
        for fault in faults:
            print(fault)
        checked = counted(slides, "slide") if stored.kind in SCORED else counted(files, "file")
        print(f"{checked} checked, {counted(len(faults), 'fault')}, {counted(lost, 'failed slide')}.")
    return 1 if faults else 0


def _count(read: Callable[[], Sized]) -> int:
    """How many a table of the run names; none where it cannot be read, which is a fault of its own."""
    try:
        return len(read())
    except XmilError:
        return 0
