"""`flashmesh kv stat|ls|verify|evict`: what kvstore nodes hold, whether it is intact, and how to drop it.

All nodes of the mesh are asked, or those named by `--address`. For programs `--json` prints one object a line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterable, Sequence

    from rich.table import Table

    from flashmesh.kv_admin import KvAdmin
    from flashmesh.v1 import kvstore_pb2

MEGA = 1_000_000
LS_PAGE = 256
HASH_DIGITS = 32
MIN_WIDTH = 120


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    text = "show blocks, bytes by tier, leases and waiting Gets"
    _add_action(actions, "stat", text, _stat)
    text = "list blocks, oldest first"
    ls = _add_action(actions, "ls", text, _ls)
    ls.add_argument("--limit", type=int, metavar="N", help="of each node; default: all")
    text = "have the nodes read and check all they hold; bad blocks are dropped, exit status 1"
    verify = _add_action(actions, "verify", text, _verify)
    verify.add_argument(
        "--mb-per-s", type=float, metavar="N", help="a node reads no faster; default: 200"
    )
    text = "drop blocks; leased ones stay"
    evict = _add_action(actions, "evict", text, _evict)
    evict.add_argument(
        "hashes", nargs="*", metavar="HASH", help="32 hex digits, as `ls` shows them"
    )
    evict.add_argument("--all", action="store_true", help="everything that is not leased")


def _add_action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str, act: Any
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=text, description=text)
    parser.add_argument(
        "--address",
        action="append",
        metavar="HOST:PORT",
        help="a node, once or more; default: all that are registered",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="for [mesh]; default: the mesh started by `up`"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.set_defaults(act=act)
    return parser


def run(args: argparse.Namespace) -> int:
    """Does what was asked."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from flashmesh import mesh_file
    from flashmesh.kv_admin import KvAdmin
    from flashmesh.rpc import Channels

    addresses, token = await _nodes(args)
    tls = mesh_file.find_tls(args.config)
    async with contextlib.aclosing(Channels(token, tls)) as channels:
        status: int = await args.act(args, KvAdmin(channels), addresses)
        return status


async def _nodes(args: argparse.Namespace) -> tuple[Sequence[str], str]:
    """Returns the nodes' addresses and the mesh token.

    Raises:
        WorkerLost: no node is registered, or Redis does not answer.
    """
    from redis.exceptions import RedisError

    from flashmesh import config, mesh_file
    from flashmesh.config import MeshConfig
    from flashmesh.errors import WorkerLost
    from flashmesh.redis_client import connect
    from flashmesh.registry import Registry

    if args.address:
        mesh = config.load(args.config, {"mesh": MeshConfig})["mesh"]
        return args.address, mesh.secret()
    url, name, token = mesh_file.find_redis(args.config)
    async with contextlib.aclosing(connect(url)) as client:
        try:
            records = await Registry(client, name).list()
        except (RedisError, OSError) as error:
            raise WorkerLost(f"the registry of mesh {name!r} cannot be read: {error}") from error
    addresses = [record.address for record in records if record.role == "kvstore"]
    if not addresses:
        raise WorkerLost(f"no kvstore node is registered in mesh {name!r}")
    return addresses, token


async def _stat(args: argparse.Namespace, admin: KvAdmin, addresses: Sequence[str]) -> int:
    stats = [(address, await admin.stat(address)) for address in addresses]
    if args.json:
        for address, stat in stats:
            _print_json(_stat_fields(address, stat))
        return 0
    table = _table(
        ["node", "address", "leases", "waiting", "tier"],
        ["blocks", "used MB", "leased MB", "of MB"],
    )
    for address, stat in stats:
        node = [stat.node_id, address, str(stat.num_leases), str(stat.num_waiting_gets)]
        for tier in stat.tiers:
            used = tier.leased_bytes + tier.evictable_bytes
            sizes = (used, tier.leased_bytes, tier.capacity_bytes)
            table.add_row(*node, tier.tier, f"{tier.num_blocks:,}", *map(_megabytes, sizes))
            node = ["", "", "", ""]
    _print(table)
    return 0


def _stat_fields(address: str, stat: kvstore_pb2.StatResponse) -> dict[str, Any]:
    return {
        "node": stat.node_id,
        "address": address,
        "epoch": stat.epoch.hex(),
        "num_blocks": stat.num_blocks,
        "num_leases": stat.num_leases,
        "num_waiting_gets": stat.num_waiting_gets,
        "tiers": {
            tier.tier: {
                "num_blocks": tier.num_blocks,
                "leased_bytes": tier.leased_bytes,
                "evictable_bytes": tier.evictable_bytes,
                "capacity_bytes": tier.capacity_bytes,
            }
            for tier in stat.tiers
        },
    }


async def _ls(args: argparse.Namespace, admin: KvAdmin, addresses: Sequence[str]) -> int:
    from flashmesh.errors import InvalidRequest

    if args.limit is not None and args.limit < 1:
        raise InvalidRequest(f"--limit must be at least 1, not {args.limit}")
    num_printed = 0
    for address in addresses:
        async for page in _pages(admin, address, args.limit):
            rows = [_block_fields(address, block) for block in page]
            if args.json:
                for row in rows:
                    _print_json(row)
            else:
                _print(_block_table(rows, with_header=not num_printed))
            num_printed += len(rows)
    if not args.json:
        print(f"{num_printed} blocks")
    return 0


async def _pages(
    admin: KvAdmin, address: str, limit: int | None
) -> AsyncIterator[list[kvstore_pb2.BlockInfo]]:
    """Cuts a node's blocks into what is printed at a time: a node may hold millions."""
    page: list[kvstore_pb2.BlockInfo] = []
    num_blocks = 0
    async with contextlib.aclosing(admin.blocks(address)) as blocks:
        async for block in blocks:
            page.append(block)
            num_blocks += 1
            if len(page) == LS_PAGE:
                yield page
                page = []
            if num_blocks == limit:
                break
    if page:
        yield page


def _block_fields(address: str, block: kvstore_pb2.BlockInfo) -> dict[str, Any]:
    tiers = (("memory", block.in_memory), ("disk", block.on_disk))
    return {
        "hash": block.hash.hex(),
        "run": block.run.hex(),
        "position": block.position,
        "bytes": block.num_bytes,
        "tiers": [tier for tier, held in tiers if held],
        "leased": block.leased,
        "address": address,
    }


def _block_table(rows: Iterable[dict[str, Any]], *, with_header: bool) -> Table:
    table = _table(["hash", "run"], ["position", "bytes"], ["tiers", "leased", "address"])
    table.show_header = with_header
    # Fixed, so that the pages line up.
    for column, width in zip(table.columns, (32, 8, 9, 11, 11, 6, 0), strict=True):
        column.width = width or None
        column.no_wrap = True
    for row in rows:
        table.add_row(
            row["hash"],
            row["run"][:8],
            f"{row['position']:,}",
            f"{row['bytes']:,}",
            "+".join(row["tiers"]),
            "yes" if row["leased"] else "",
            row["address"],
        )
    return table


async def _verify(args: argparse.Namespace, admin: KvAdmin, addresses: Sequence[str]) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from flashmesh.errors import InvalidRequest

    if args.mb_per_s is not None and args.mb_per_s <= 0:
        raise InvalidRequest(f"--mb-per-s must be above 0, not {args.mb_per_s:g}")
    bytes_per_s = max(1, int(args.mb_per_s * MEGA)) if args.mb_per_s else 0
    done: list[dict[str, Any]] = []
    with Progress(console=Console(stderr=True)) as bar:
        for address in addresses:
            task = bar.add_task(address, total=None)
            bad: list[str] = []
            async with contextlib.aclosing(admin.verify(address, bytes_per_s)) as steps:
                async for step in steps:
                    bad += [hash.hex() for hash in step.bad_hashes]
                    bar.update(task, completed=step.num_checked, total=step.num_total)
            done.append(
                {
                    "address": address,
                    "num_checked": step.num_checked,
                    "num_bytes": step.num_bytes,
                    "bad_hashes": bad,
                }
            )
    if args.json:
        for row in done:
            _print_json(row)
    else:
        table = _table(["address"], ["checked", "MB", "bad, dropped"])
        for row in done:
            counts = (f"{row['num_checked']:,}", _megabytes(row["num_bytes"]))
            table.add_row(row["address"], *counts, str(len(row["bad_hashes"])))
        _print(table)
        for row in done:
            for hash in row["bad_hashes"]:
                print(f"bad: {hash} on {row['address']}")
    return 1 if any(row["bad_hashes"] for row in done) else 0


async def _evict(args: argparse.Namespace, admin: KvAdmin, addresses: Sequence[str]) -> int:
    from flashmesh.errors import InvalidRequest

    if args.all == bool(args.hashes):
        raise InvalidRequest("either name HASHes or say --all")
    hashes = [_parse_hash(text) for text in args.hashes]
    table = _table(["address"], ["dropped", "leased, kept", "not there"])
    for address in addresses:
        answer = await admin.evict(address, hashes, everything=args.all)
        counts = {
            "num_evicted": answer.num_evicted,
            "num_leased": answer.num_leased,
            "num_absent": answer.num_absent,
        }
        if args.json:
            _print_json({"address": address} | counts)
        else:
            table.add_row(address, *(f"{count:,}" for count in counts.values()))
    if not args.json:
        _print(table)
    return 0


def _parse_hash(text: str) -> bytes:
    from flashmesh.errors import InvalidRequest

    try:
        hash = bytes.fromhex(text)
    except ValueError:
        hash = b""
    if len(text) != HASH_DIGITS or 2 * len(hash) != HASH_DIGITS:
        raise InvalidRequest(f"not a block's hash, which has {HASH_DIGITS} hex digits: {text!r}")
    return hash


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / MEGA:,.1f}"


def _table(left: Sequence[str], right: Sequence[str], more: Sequence[str] = ()) -> Table:
    """Makes a table with text columns, columns of numbers, and text columns again."""
    from rich.table import Table

    table = Table(*left, box=None)
    for name in right:
        table.add_column(name, justify="right")
    for name in more:
        table.add_column(name)
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    # A hash that was cut to fit is of no use.
    Console(width=max(Console().width, MIN_WIDTH), markup=False, highlight=False).print(table)


def _print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields))
