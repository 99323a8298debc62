"""The command line.

Each module here whose name does not begin with `_` is one command: `xmil/cli/NAME.py` defines a function
`NAME` with typer's annotations, and `xmil NAME` runs it. Such a module imports heavy libraries inside the
function, so that `xmil --help` stays instant.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 some slides failed, 2 nothing could be done."""
    from xmil.cli._app import run

    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))
