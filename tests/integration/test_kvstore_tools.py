"""`flashmesh kv` against nodes that are processes of their own, as an operator runs it."""

import asyncio
import contextlib
import json
import signal

import pytest
from support.kv import Chain
from support.waiting import wait_until

from flashmesh import cli, mesh_file
from flashmesh.kv_client import KvClient
from flashmesh.launcher import MeshPlan, Process
from flashmesh.redis_server import private_redis
from flashmesh.rpc import Channels

CHAIN = Chain(300)
OBJECT_BYTES = 1120


class Nodes:
    """Two nodes and their Redis, and a file that configures the tools."""

    def __init__(self, processes, config, disk):
        self.processes = processes
        self.config = config
        self.disk = disk

    @property
    def addresses(self):
        return [process.address for process in self.processes]

    def call(self, use):
        """Runs a coroutine function with a client."""

        async def main():
            async with contextlib.aclosing(Channels()) as channels:
                return await use(KvClient(channels))

        return asyncio.run(main())

    def put(self, index, objects):
        self.call(lambda client: client.put(self.addresses[index], objects))

    def have(self, index, hashes):
        return self.call(lambda client: client.have(self.addresses[index], hashes))


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nodes")
    with private_redis(folder / "redis") as url, contextlib.ExitStack() as stack:
        config = folder / "mesh.toml"
        config.write_text(f'[mesh]\nredis_url = "{url}"\n')
        disk = {"kvstore-1": {"disk_path": str(folder / "disk"), "disk_bytes": 100_000_000}}
        plan = MeshPlan(redis_url=url, num_kvstore=2, settings=disk)
        processes = [Process(f"kvstore-{index}", plan, folder) for index in range(2)]
        for process in processes:
            process.start()
            stack.callback(process.wait)
            stack.callback(process.signal, signal.SIGKILL)
        for process in processes:
            wait_until(process.healthy, "the node serves")
        yield Nodes(processes, config, folder / "disk")


@pytest.fixture
def nodes(running):
    """Both nodes, registered and empty."""
    wait_until(
        lambda: cli.main(["kv", "evict", "--all", "--config", str(running.config)]) == 0,
        "registered",
    )
    return running


def kv(capsys, nodes, *args, address=None):
    """Runs `flashmesh kv` and returns its status and its JSON lines."""
    where = ["--address", address] if address else ["--config", str(nodes.config)]
    capsys.readouterr()
    status = cli.main(["kv", *args, *where, "--json"])
    return status, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_stat_counts_blocks_and_bytes_of_every_node_by_tier(nodes, capsys):
    nodes.put(0, CHAIN.objects[:3])
    status, stats = kv(capsys, nodes, "stat")
    assert status == 0
    assert [stat["node"] for stat in stats] == ["kvstore-0", "kvstore-1"]
    assert [stat["address"] for stat in stats] == nodes.addresses
    assert [stat["num_blocks"] for stat in stats] == [3, 0]
    assert list(stats[0]["tiers"]) == ["memory"]
    assert list(stats[1]["tiers"]) == ["memory", "disk"]
    memory = stats[0]["tiers"]["memory"]
    assert (memory["num_blocks"], memory["evictable_bytes"]) == (3, 3 * OBJECT_BYTES)
    assert memory["leased_bytes"] == 0
    assert stats[0]["num_leases"] == 0


def test_a_person_gets_tables(nodes, capsys):
    nodes.put(0, CHAIN.objects[:1])
    config = ["--config", str(nodes.config)]
    for action in (["stat"], ["ls"], ["verify"], ["evict", CHAIN.hashes[0].hex()]):
        assert cli.main(["kv", *action, *config]) == 0
    shown = capsys.readouterr().out
    assert all(address in shown for address in nodes.addresses)
    assert CHAIN.hashes[0].hex() in shown
    assert "\n1 blocks\n" in shown
    assert "memory" in shown


def test_ls_pages_through_all_blocks(nodes, capsys):
    nodes.put(0, CHAIN.objects)
    address = nodes.addresses[0]
    status, blocks = kv(capsys, nodes, "ls", address=address)
    assert status == 0
    assert [block["hash"] for block in blocks] == [hash.hex() for hash in CHAIN.hashes]
    assert blocks[200] == {
        "hash": CHAIN.hashes[200].hex(),
        "run": CHAIN.hashes[192].hex(),
        "position": 200 * 128,
        "bytes": OBJECT_BYTES,
        "tiers": ["memory"],
        "leased": False,
        "address": address,
    }


def test_ls_says_what_is_leased_and_what_is_on_disk(nodes, capsys):
    nodes.put(1, CHAIN.objects[:2])
    address = nodes.addresses[1]
    nodes.call(lambda client: client.lease(address, "a", CHAIN.hashes[:1], 30))
    written = lambda: all(
        block["tiers"] == ["memory", "disk"]
        for block in kv(capsys, nodes, "ls", address=address)[1]
    )
    wait_until(written, "both blocks are on disk")
    _, blocks = kv(capsys, nodes, "ls")
    assert [block["leased"] for block in blocks] == [True, False]
    nodes.call(lambda client: client.release(address, ["a"]))


def test_ls_stops_at_its_limit_on_each_node(nodes, capsys):
    nodes.put(0, CHAIN.objects)
    nodes.put(1, CHAIN.objects[:2])
    _, blocks = kv(capsys, nodes, "ls", "--limit", "260")
    assert len(blocks) == 260 + 2


def test_verify_reads_everything_and_finds_nothing(nodes, capsys):
    nodes.put(0, CHAIN.objects)
    nodes.put(1, CHAIN.objects[:2])
    status, (first, second) = kv(capsys, nodes, "verify", "--mb-per-s", "1000")
    assert status == 0
    assert (first["num_checked"], first["num_bytes"], first["bad_hashes"]) == (
        300,
        300 * OBJECT_BYTES,
        [],
    )
    assert second["num_checked"] == 2


def test_verify_names_and_drops_what_has_rotted_on_disk(nodes, capsys):
    chain = Chain(3, seed=7)
    nodes.put(1, chain.objects)
    address = nodes.addresses[1]
    rotten = chain.objects[1].data

    def segment_with_it():
        return next((path for path in nodes.disk.iterdir() if rotten in read_bytes(path)), None)

    wait_until(segment_with_it, "the block is on disk")
    path = segment_with_it()
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(rotten) + len(rotten) - 1)
        file.write(b"\xff")
    status, (answer,) = kv(capsys, nodes, "verify", address=address)
    assert status == 1
    assert answer["bad_hashes"] == [chain.hashes[1].hex()]
    _, blocks = kv(capsys, nodes, "ls", address=address)
    tiers = {block["hash"]: block["tiers"] for block in blocks}
    assert tiers[chain.hashes[1].hex()] == ["memory"], "the copy in memory was good"
    assert kv(capsys, nodes, "verify", address=address)[0] == 0


def read_bytes(path):
    return path.read_bytes() if path.is_file() else b""


def test_evict_drops_named_blocks_and_says_what_it_left(nodes, capsys):
    nodes.put(0, CHAIN.objects[:3])
    address = nodes.addresses[0]
    nodes.call(lambda client: client.lease(address, "a", CHAIN.hashes[:1], 30))
    names = [hash.hex() for hash in (CHAIN.hashes[0], CHAIN.hashes[1], CHAIN.hashes[200])]
    _, (answer,) = kv(capsys, nodes, "evict", *names, address=address)
    assert answer == {"address": address, "num_evicted": 1, "num_leased": 1, "num_absent": 1}
    assert nodes.have(0, CHAIN.hashes[:3]) == [True, False, True]
    _, (answer,) = kv(capsys, nodes, "evict", "--all", address=address)
    assert (answer["num_evicted"], answer["num_leased"]) == (1, 1)
    nodes.call(lambda client: client.release(address, ["a"]))
    assert nodes.have(0, CHAIN.hashes[:3]) == [True, False, False]


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["evict"], "either name HASHes or say --all"),
        (["evict", "--all", "ab" * 16], "either name HASHes or say --all"),
        (["evict", "xyz"], "32 hex digits: 'xyz'"),
        (["evict", "ab" * 15], "32 hex digits"),
        (["evict", " ".join(["ab"] * 11)], "32 hex digits"),
        (["ls", "--limit", "0"], "--limit must be at least 1, not 0"),
        (["verify", "--mb-per-s", "-1"], "--mb-per-s must be above 0, not -1"),
        (["stat"], "kvstore 127.0.0.1:1: "),
    ],
)
def test_bad_input_is_a_line_and_status_1(args, complaint, capsys):
    assert cli.main(["kv", *args, "--address", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("flashmesh: ")
    assert complaint in error


def test_without_a_mesh_the_way_to_name_one_is_told(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["kv", "stat"]) == 1
    assert "mesh.redis_url" in capsys.readouterr().err


def test_a_registry_that_is_away_is_named(capsys, tmp_path):
    config = tmp_path / "mesh.toml"
    config.write_text(f'[mesh]\nredis_url = "unix://{tmp_path}/none.sock"\n')
    assert cli.main(["kv", "stat", "--config", str(config)]) == 1
    assert "the registry of mesh 'local' cannot be read" in capsys.readouterr().err


def test_a_mesh_without_nodes_is_named(capsys, tmp_path):
    config = tmp_path / "mesh.toml"
    with private_redis(tmp_path / "redis") as url:
        config.write_text(f'[mesh]\nredis_url = "{url}"\nname = "empty"\n')
        assert cli.main(["kv", "stat", "--config", str(config)]) == 1
    assert "no kvstore node is registered in mesh 'empty'" in capsys.readouterr().err


def test_the_mesh_that_is_up_here_is_found_without_arguments(nodes, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mesh_file.FOLDER.mkdir()
    url = nodes.config.read_text().split('"')[1]
    with mesh_file.announced("127.0.0.1:1", {}, "", name="local", redis_url=url):
        assert cli.main(["kv", "stat", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
