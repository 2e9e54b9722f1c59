"""`flashmesh model inspect|make-demo|make-tiny`: looks into checkpoints and makes small ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

    from flashmesh.kernels.inspect import Inspection


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    text = "show what a checkpoint folder holds and what its workers would load; reads headers only"
    inspect = actions.add_parser("inspect", help=text, description=text)
    inspect.add_argument("path", type=Path, metavar="PATH")
    inspect.add_argument(
        "--expert-ranks",
        type=int,
        default=1,
        metavar="N",
        help="show what a worker loads that shares the routed experts with others, N in all",
    )
    inspect.set_defaults(act=_inspect)
    text = "write a checkpoint of random weights below OUT and print its folder"
    make_demo = actions.add_parser("make-demo", help=text, description=text)
    make_demo.add_argument("out", type=Path, metavar="OUT")
    make_demo.set_defaults(act=_make_demo)
    text = "write a checkpoint of random weights as folder OUT, of any small config.json"
    make_tiny = actions.add_parser("make-tiny", help=text, description=text)
    make_tiny.add_argument("out", type=Path, metavar="OUT")
    make_tiny.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="sizes, with the tokenizer.json beside it where there is one; default: the built-in",
    )
    make_tiny.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights")
    make_tiny.set_defaults(act=_make_tiny)


def run(args: argparse.Namespace) -> int:
    """Does what was asked."""
    status: int = args.act(args)
    return status


def _make_demo(args: argparse.Namespace) -> int:
    from flashmesh.kernels.demo import demo_checkpoint

    print(demo_checkpoint(args.out))
    return 0


def _make_tiny(args: argparse.Namespace) -> int:
    from flashmesh.kernels.demo import make_tiny_checkpoint

    make_tiny_checkpoint(args.out, config_file=args.config, seed=args.seed)
    print(args.out)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    """Shows the tables; exit status 1 where an engine would refuse the files."""
    from rich.console import Console

    from flashmesh.kernels.inspect import inspect_checkpoint
    from flashmesh.kernels.tensor_names import ExpertShard

    # The first rank: where experts do not divide evenly, none holds more.
    found = inspect_checkpoint(args.path, ExpertShard(0, args.expert_ranks))
    console = Console()
    _print_files(console, found)
    _print_roles(console, found)
    if found.problem is None:
        console.print("names, shapes and dtypes fit config.json")
        return 0
    console.print(f"unusable: {found.problem}", style="red", markup=False, soft_wrap=True)
    return 1


def _print_files(console: Console, found: Inspection) -> None:
    from rich.table import Table

    table = Table("stored", "tensors", "bytes", "parameters")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, total in found.kinds.items():
        table.add_row(name, f"{total.num_tensors:,}", f"{total.num_bytes:,}")
    table.add_section()
    for name, total in found.parts.items():
        parameters = _billions(found.parameters[name], 2)
        table.add_row(name, f"{total.num_tensors:,}", f"{total.num_bytes:,}", parameters)
    table.add_section()
    table.add_row(
        f"{found.num_shards} shards",
        f"{found.total.num_tensors:,}",
        f"{found.total.num_bytes:,}",
        _billions(sum(found.parameters.values()), 2),
    )
    console.print(table)


def _print_roles(console: Console, found: Inspection) -> None:
    from rich.table import Table

    table = Table("a worker", *found.roles)
    for column in table.columns[1:]:
        column.justify = "right"
    loaded = [total.loaded for total in found.roles.values()]
    mapped = [total.mapped for total in found.roles.values()]
    active = found.active.values()
    table.add_row("tensors loaded", *(f"{total.num_tensors:,}" for total in loaded))
    table.add_row("bytes loaded", *(f"{total.num_bytes:,}" for total in loaded))
    table.add_row("bytes of mapped Engram tables", *(f"{total.num_bytes:,}" for total in mapped))
    table.add_section()
    table.add_row("active parameters", *(_billions(count.layers, 0) for count in active))
    table.add_row("  in layers and head", *(_billions(count.layers, 2) for count in active))
    table.add_row("  in Engram and indexers", *(_billions(count.others, 2) for count in active))
    console.print(table)
    console.print(
        f"KV: {found.kv_bytes_per_token:,.10g} bytes a token, {found.block_bytes:,} bytes a block"
    )


def _billions(count: int, digits: int) -> str:
    return f"{count / 1e9:,.{digits}f}B" if count >= 10**7 else f"{count:,}"
