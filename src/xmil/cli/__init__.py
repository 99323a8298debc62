"""The command line.

Each module here whose name does not begin with `_` is one command: `xmil/cli/NAME.py` defines a function
`NAME` with typer's annotations, and `xmil NAME` runs it. Such a module imports heavy libraries inside the
function, so that `xmil --help` stays instant.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 some slides failed, 2 nothing could be done."""
    if arguments is None:  # run as a program
        os.environ["PYTHONSAFEPATH"] = "1"  # no process that libraries start imports from the current folder

    from xmil.cli._app import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


def forget_current_folder() -> None:
    """Remove the current folder, which `python -m` puts first, from the path, unless xmil itself is there."""
    here, home = os.getcwd(), os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    is_first = not sys.flags.safe_path and sys.path[:1] == [here]
    if is_first and not os.path.samefile(home, here):
        del sys.path[0]
