"""`python -m flashgen` is the `flashgen` command."""

from flashgen.tools.cli import main

if __name__ == "__main__":
    main(prog_name="python -m flashgen")
