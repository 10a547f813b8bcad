"""Command line of the benchmarks."""

import argparse

from dcpjax.bench import dispatch


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dcpjax.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    dispatch.add_arguments(commands.add_parser("dispatch", help="host time of one jitted step, by number of arrays"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
