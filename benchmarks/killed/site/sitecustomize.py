"""Found by the worker processes of a command under kills: they die at the same points."""

import os
import sys
from pathlib import Path

if "KILL_AT" in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[3]))
    from benchmarks.killed.points import install

    install(
        int(os.environ["KILL_AT"]), Path(os.environ["KILL_COUNTER"]), everyone=os.environ["KILL_ALL"] == "1"
    )
