"""`python -m xmil.cli`."""

from xmil.cli import main

main()
