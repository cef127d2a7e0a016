"""`python -m monarch`: the command line, for where the script `monarch` is not on PATH."""

from __future__ import annotations

from monarch.cli import main

if __name__ == "__main__":
    main(prog_name="monarch")
