"""`python -m xmil.cli`."""

from xmil.cli import forget_current_folder, main

forget_current_folder()
main()
