"""`python -m meshwright` is the `meshwright` command."""

from meshwright.cli.main import main

main()
