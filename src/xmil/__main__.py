"""`python -m xmil`: the command line where no script `xmil` is on the path."""

from xmil.cli import main

main()
