"""`python -m meshwright` is the `meshwright` command."""

from meshwright.cli.main import main

if __name__ == "__main__":  # a fork server imports this module once more
    main()
