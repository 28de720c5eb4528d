"""The command line: ``python -m mindspeed_llm.run CONFIG.yaml [--section.key=value ...]``.

Exit status: 0 done; 2 the configuration or the data is wrong (one message says what to mend); 1 anything else.
What is slow to import comes in late, so that a wrong configuration is told at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from mindspeed_llm.config import Config, load_config, split_overrides, unknown_key, validate_world
from mindspeed_llm.errors import ConfigError
from mindspeed_llm.foundation import host_memory
from mindspeed_llm.launch import launch, report_error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        others, overrides = split_overrides(arguments)
        options = _parse(others)
        config = load_config(options.config, overrides)
        if options.print_config:
            print(config.dump_yaml(), end="")
            return 0
        world_size = options.world_size or options.nproc or int(os.environ.get("WORLD_SIZE", 1))
        _check_world(config, world_size, options.config)
        if options.dry_run:
            _dry_run(config, world_size)
        elif (options.nproc or 1) > 1:
            return launch(["-m", "mindspeed_llm.run", options.config, *overrides], options.nproc)
        else:
            _train(config)
    except KeyboardInterrupt:  # while steps are taken, the trainer itself listens to it
        print("stopped by Ctrl-C while not training: there was no step to finish", file=sys.stderr)
        return 1
    except Exception as error:
        return report_error(error)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m mindspeed_llm.run",
        usage="%(prog)s CONFIG.yaml [--section.key=value ...] [--nproc N]\n"
        "       [--dry-run [--world-size N]] [--print-config]",
        description="Pretrain or fine-tune a Hugging Face causal language model.",
        epilog="docs/configuration.md, or `python -m mindspeed_llm.config`, has every key.",
        allow_abbrev=False,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the configuration; --section.key=value overrides a key")
    parser.add_argument("--nproc", type=_positive, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--dry-run", action="store_true", help="check model, data and sizes without training")
    parser.add_argument("--world-size", type=_positive, metavar="N", help="ranks that --dry-run checks for")
    parser.add_argument("--print-config", action="store_true", help="print the configuration with every default")
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].lstrip("-").partition("=")[0]
        raise ConfigError(f"{unknown[0]}: keys are given as --section.key=value; {name}: {unknown_key((name,))}")
    if options.world_size and not options.dry_run:
        parser.error("--world-size goes with --dry-run; --nproc starts ranks")
    if options.nproc and "RANK" in os.environ:
        raise ConfigError("--nproc starts ranks itself, but torchrun (RANK is set) has started this one; drop either")
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)


def _check_world(config: Config, world_size: int, path: str) -> None:
    try:
        validate_world(config, world_size)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _train(config: Config) -> None:
    from mindspeed_llm.trainer import train

    train(config)


def _dry_run(config: Config, world_size: int) -> None:
    from mindspeed_llm.dry_run import dry_run

    dry_run(config, world_size)


if __name__ == "__main__":
    host_memory.set_up(__spec__.name if __spec__ else sys.argv[0])
    sys.exit(main())
