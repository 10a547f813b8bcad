"""Command line of the benchmarks."""

import argparse

from dcpjax.bench import cache, capacity_points, dispatch, exchange, kernels, load, prefix, records, seed_table, serve


def main() -> None:
    """Runs the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m dcpjax.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    dispatch.add_arguments(commands.add_parser("dispatch", help="host time of one jitted step, by number of arrays"))
    cache.add_arguments(commands.add_parser("cache", help="prefix hits on a trace, and host time per page"))
    seed_table.add_arguments(
        commands.add_parser("seed-table", help="capacity, hits, acceptance and speed of every layout")
    )
    prefix.add_arguments(commands.add_parser("prefix", help="time to the first token with 90 % of a prompt shared"))
    kernels.add_arguments(commands.add_parser("kernels", help="times of every kernel beside XLA"))
    records.add_arguments(commands.add_parser("records", help="look-ups and selections with each kind of cache"))
    serve.add_arguments(commands.add_parser("serve", help="load on a running server; or what a server costs alone"))
    load.add_arguments(
        commands.add_parser("load", help="loading a checkpoint, beside the disk and the way to the devices")
    )
    capacity_points.add_arguments(
        commands.add_parser("capacity-points", help="cache sizes that other engines have published, and ours for them")
    )
    exchange.add_arguments(commands.add_parser("exchange", help="ways to bring tokens to experts on other devices"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
