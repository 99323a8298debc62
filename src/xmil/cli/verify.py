"""`xmil verify`: is a run complete and unchanged, and does it match its inputs?"""

from __future__ import annotations

import json
from collections.abc import Callable, Sized
from pathlib import Path

from xmil.cli._command import command, with_examples
from xmil.cli._screen import Screen
from xmil.core.errors import XmilError
from xmil.core.request import Request, option


class VerifyRequest(Request):
    """Check the files of a run."""

    run: Path = option("Folder of a run, of any command.", argument=True)
    quick: bool = option("Compare the sizes of files only.", False)


@with_examples("verify run", "verify run --quick")
@command(VerifyRequest)
def verify(request: VerifyRequest, screen: Screen) -> int:
    """Check that the files of a run are unchanged, its audits add up, and its models and features match."""
    from xmil.core.text import counted
    from xmil.runs.verify import SCORED, run_files, unknowns, verify_run
    from xmil.storage import open_run

    stored = open_run(request.run)
    faults, files, notes = verify_run(stored, quick=request.quick), len(run_files(stored)), unknowns(stored)
    slides, lost = _count(lambda: stored.slides), _count(lambda: stored.failed)
    if request.quick:
        notes.append("Only sizes were compared, so changes that keep a file's size are not noticed.")
    if screen.as_json:
        about = {"kind": stored.kind, "slides": slides, "files": files, "quick": request.quick}
        print(json.dumps({**about, "faults": [vars(fault) for fault in faults], "notes": notes}, indent=2))
    else:
        for fault in faults:
            print(fault)
        for note in notes:
            print(f"Note: {note}")
        checked = counted(slides, "slide") if stored.kind in SCORED else counted(files, "file")
        print(f"{checked} checked, {counted(len(faults), 'fault')}, {counted(lost, 'failed slide')}.")
    return 1 if faults else 0


def _count(read: Callable[[], Sized]) -> int:
    """Count the rows of a table of the run; 0 if it cannot be read, which is a separate fault."""
    try:
        return len(read())
    except XmilError:
        return 0
