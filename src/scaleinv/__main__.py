"""``python -m scaleinv``: the command line, also under torchrun."""

from scaleinv.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
