"""``python -m torchturbo``, which is also what torchrun starts."""

from torchturbo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
