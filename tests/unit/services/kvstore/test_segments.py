"""Segment files: what is written comes back, and what is damaged never does."""

import contextlib
import stat

import pytest
from support.faulty_files import FaultyFiles
from support.kv import Chain

from flashmesh.errors import ConfigError, CorruptBlock
from flashmesh.objects import HEADER_BYTES
from flashmesh.services.kvstore.segments import Files, Record, SegmentLog

CHAIN = Chain(6)
OBJECT_BYTES = len(CHAIN.objects[0].data)


@contextlib.contextmanager
def open_log(folder, *, num_records=10, files=None):
    log = SegmentLog(folder, num_records * OBJECT_BYTES, files or Files())
    try:
        yield log
    finally:
        log.close()


def write(folder, objects, **options):
    """Writes objects as an earlier process would have; returns the files, oldest first."""
    with open_log(folder, **options) as log:
        for item in objects:
            log.append(item.data)
    return sorted(folder.iterdir())


def scan(folder):
    """What a later process finds in the only segment: hashes, and None for what is damaged."""
    with open_log(folder) as log:
        (segment,) = log.segments
        return [found.hash if isinstance(found, Record) else None for found in log.scan(segment)]


def flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


def test_a_record_is_read_from_where_it_was_appended(tmp_path):
    with open_log(tmp_path) as log:
        places = [log.append(item.data) for item in CHAIN.objects]
        for item, (segment, offset) in zip(CHAIN.objects, places, strict=True):
            read = log.read(segment, item.hash, offset, len(item.data))
            assert read.data == item.data
            assert (read.run, read.parent, read.position) == (item.run, item.parent, item.position)


def test_a_later_process_finds_the_records_and_writes_another_file(tmp_path):
    write(tmp_path, CHAIN.objects[:3])
    with open_log(tmp_path) as log:
        (old,) = log.segments
        found = list(log.scan(old))
        new, offset = log.append(CHAIN.objects[3].data)
        assert (new.number, offset) == (old.number + 1, 0)
        assert log.num_bytes == 4 * OBJECT_BYTES
    assert [record.hash for record in found] == CHAIN.hashes[:3]
    assert [record.offset for record in found] == [0, OBJECT_BYTES, 2 * OBJECT_BYTES]


def test_a_full_segment_is_followed_by_another(tmp_path):
    assert len(write(tmp_path, CHAIN.objects, num_records=2)) == 3


def test_of_half_a_record_nothing_is_left_and_the_next_one_is_written(tmp_path):
    files = FaultyFiles()
    with open_log(tmp_path, files=files) as log:
        log.append(CHAIN.objects[0].data)
        files.free_bytes = OBJECT_BYTES // 2
        with pytest.raises(OSError, match="No space"):
            log.append(CHAIN.objects[1].data)
        assert log.num_bytes == OBJECT_BYTES
        files.free_bytes = None
        log.append(CHAIN.objects[2].data)
    assert scan(tmp_path) == [CHAIN.hashes[0], CHAIN.hashes[2]]


def test_half_a_record_that_cannot_be_taken_back_ends_its_segment(tmp_path):
    files = FaultyFiles()
    with open_log(tmp_path, files=files) as log:
        first, _ = log.append(CHAIN.objects[0].data)
        files.free_bytes = OBJECT_BYTES // 2
        files.broken = {"truncate"}
        with pytest.raises(OSError, match="No space"):
            log.append(CHAIN.objects[1].data)
        files.free_bytes = None
        second, _ = log.append(CHAIN.objects[2].data)
        assert second is not first
        assert log.num_bytes == 2 * OBJECT_BYTES + OBJECT_BYTES // 2
        found = list(log.scan(first))
    assert [type(item) for item in found] == [Record, CorruptBlock]


def test_a_torn_tail_is_left_out(tmp_path):
    (path,) = write(tmp_path, CHAIN.objects[:3])
    path.write_bytes(path.read_bytes()[:-1])
    assert scan(tmp_path) == [*CHAIN.hashes[:2], None]
    path.write_bytes(path.read_bytes()[: 2 * OBJECT_BYTES + HEADER_BYTES - 1])
    assert scan(tmp_path) == [*CHAIN.hashes[:2], None]


@pytest.mark.parametrize("offset", [30, HEADER_BYTES - 1, HEADER_BYTES, OBJECT_BYTES - 1])
def test_a_flipped_bit_costs_its_record_only(tmp_path, offset):
    (path,) = write(tmp_path, CHAIN.objects[:3])
    flip(path, OBJECT_BYTES + offset)
    assert scan(tmp_path) == [CHAIN.hashes[0], None, CHAIN.hashes[2]]


@pytest.mark.parametrize("offset", [0, 5, 96, 97, 103])
def test_where_a_header_is_no_guide_the_rest_of_the_segment_is_left_out(tmp_path, offset):
    (path,) = write(tmp_path, CHAIN.objects[:3])
    flip(path, OBJECT_BYTES + offset)
    found = scan(tmp_path)
    assert found[0] == CHAIN.hashes[0]
    assert set(found[1:]) == {None}


def test_zeros_where_the_machine_lost_power_are_no_records(tmp_path):
    (path,) = write(tmp_path, CHAIN.objects[:3])
    path.write_bytes(path.read_bytes()[:OBJECT_BYTES] + bytes(2 * OBJECT_BYTES))
    assert scan(tmp_path) == [CHAIN.hashes[0], None]


@pytest.mark.parametrize("wrong", ["another object", "rot", "cut off"])
def test_reading_returns_the_block_or_an_error(tmp_path, wrong):
    with open_log(tmp_path) as log:
        segment, _ = log.append(CHAIN.objects[0].data)
        log.append(CHAIN.objects[1].data)
        (path,) = tmp_path.iterdir()
        offset = OBJECT_BYTES if wrong == "another object" else 0
        if wrong == "rot":
            flip(path, OBJECT_BYTES // 2)
        if wrong == "cut off":
            path.write_bytes(b"")
        with pytest.raises(CorruptBlock):
            log.read(segment, CHAIN.hashes[0], offset, OBJECT_BYTES)


def test_a_file_that_is_deleted_under_us_is_not_written_to(tmp_path):
    with open_log(tmp_path) as log:
        first, offset = log.append(CHAIN.objects[0].data)
        (path,) = tmp_path.iterdir()
        path.unlink()
        with pytest.raises(FileNotFoundError):
            log.read(first, CHAIN.hashes[0], offset, OBJECT_BYTES)
        log.append(CHAIN.objects[1].data)
        log.remove(first)
        assert log.num_bytes == OBJECT_BYTES
    assert scan(tmp_path) == [CHAIN.hashes[1]]


def test_files_are_for_their_owner_only(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o755)
    (path,) = write(folder, CHAIN.objects[:1])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_folder_has_one_user_at_a_time(tmp_path):
    with open_log(tmp_path), pytest.raises(ConfigError, match="another node"):
        SegmentLog(tmp_path, OBJECT_BYTES, Files())
    with open_log(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_path = .*file/disk: Not a directory"):
        SegmentLog(tmp_path / "file" / "disk", OBJECT_BYTES, Files())


def test_what_others_put_into_the_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.blocks").write_text("not ours")
    (tmp_path / "1.blocks").mkdir()
    with open_log(tmp_path) as log:
        assert log.segments == []
