"""``torchturbo llamafactory``: LLaMA-Factory's pt and sft stages with the engine underneath."""

from __future__ import annotations

from torchturbo.cli.train import asks_for_help, outcome

USAGE = """\
usage: torchturbo llamafactory FILE [KEY=VALUE ...] [OPTION ...]
       torchturbo llamafactory --KEY VALUE ... [OPTION ...]

Run LLaMA-Factory's training with the TorchTurbo engine underneath: the stages pt and sft, the methods full, freeze
and lora.

FILE is the YAML or JSON file that `llamafactory-cli train` takes. KEY=VALUE, or --KEY VALUE, overrides a key of it;
without a file all of LLaMA-Factory's arguments are flags. `llamafactory-cli train --help` lists them.

On several devices this starts torchrun by itself; `torchrun ... -m torchturbo llamafactory FILE` works too.

"""


def run(argv: list[str]) -> int:
    """Train as the command line says; the exit statuses are those of ``torchturbo train``."""
    if asks_for_help(argv):
        from torchturbo.engine.args import help_text

        print(USAGE + help_text(), end="")
        return 0
    return outcome(lambda: _train(argv))


def _train(argv: list[str]) -> None:
    from torchturbo.adapters.llama_factory.command import read_command
    from torchturbo.adapters.llama_factory.launcher import relaunch

    command = read_command(argv)
    relaunch(command, argv)  # where there are several devices it does not return
    from torchturbo.adapters.llama_factory.run import run_command  # torch

    run_command(command)
