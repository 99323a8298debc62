"""`python -m xmil`: the command line where no script `xmil` is on the path."""

from xmil.cli import forget_current_folder, main

forget_current_folder()
main()
