"""``python -m torchturbo.adapters.llama_factory``, which is ``torchturbo llamafactory``."""

import sys

from torchturbo.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["llamafactory", *sys.argv[1:]]))
