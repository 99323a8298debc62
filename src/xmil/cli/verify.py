"""`xmil verify`: is a run whole, and is it of the inputs that are there now?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def verify(
    run: Annotated[Path, typer.Argument(help="Folder of a run of `xmil explain`.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Check a run's files and table against their checksums, accounts, settings, models and features."""
    from xmil.core.names import counted
    from xmil.core.run import open_run
    from xmil.runs.verify import verify_run

    held = open_run(run)
    faults = verify_run(held)
    if as_json:
        print(json.dumps({"slides": len(held), "faults": [vars(fault) for fault in faults]}, indent=2))
    else:
        for fault in faults:
            print(fault)
        checked, failed = counted(len(held), "slide"), counted(len(held.failed), "failed slide")
        print(f"{checked} checked, {counted(len(faults), 'fault')}, {failed}.")
    return 1 if faults else 0
