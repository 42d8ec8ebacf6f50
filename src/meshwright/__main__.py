"""`python -m meshwright`."""

from meshwright.cli.main import main

main()
