from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HaveRequest(_message.Message):
    __slots__ = ("hashes",)
    HASHES_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HaveResponse(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("lease_id", "hashes", "ttl_ms")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_ms: int
    def __init__(self, lease_id: _Optional[str] = ..., hashes: _Optional[_Iterable[bytes]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: bytes
    def __init__(self, epoch: _Optional[bytes] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids", "ttl_ms")
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    ttl_ms: int
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("unknown_lease_ids", "epoch")
    UNKNOWN_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    unknown_lease_ids: _containers.RepeatedScalarFieldContainer[str]
    epoch: bytes
    def __init__(self, unknown_lease_ids: _Optional[_Iterable[str]] = ..., epoch: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("hash", "reason")
    HASH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    reason: str
    def __init__(self, hash: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("quarantined",)
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    quarantined: bool
    def __init__(self, quarantined: _Optional[bool] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("node_id", "epoch", "num_blocks", "num_leases", "num_waiting_gets", "tiers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_GETS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: bytes
    num_blocks: int
    num_leases: int
    num_waiting_gets: int
    tiers: _containers.RepeatedCompositeFieldContainer[TierStat]
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_waiting_gets: _Optional[int] = ..., tiers: _Optional[_Iterable[_Union[TierStat, _Mapping]]] = ...) -> None: ...

class TierStat(_message.Message):
    __slots__ = ("tier", "num_blocks", "leased_bytes", "evictable_bytes", "capacity_bytes")
    TIER_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    tier: str
    num_blocks: int
    leased_bytes: int
    evictable_bytes: int
    capacity_bytes: int
    def __init__(self, tier: _Optional[str] = ..., num_blocks: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., capacity_bytes: _Optional[int] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockInfo]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockInfo, _Mapping]]] = ...) -> None: ...

class BlockInfo(_message.Message):
    __slots__ = ("hash", "run", "position", "num_bytes", "in_memory", "on_disk", "leased")
    HASH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    run: bytes
    position: int
    num_bytes: int
    in_memory: bool
    on_disk: bool
    leased: bool
    def __init__(self, hash: _Optional[bytes] = ..., run: _Optional[bytes] = ..., position: _Optional[int] = ..., num_bytes: _Optional[int] = ..., in_memory: _Optional[bool] = ..., on_disk: _Optional[bool] = ..., leased: _Optional[bool] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("bytes_per_s",)
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    bytes_per_s: int
    def __init__(self, bytes_per_s: _Optional[int] = ...) -> None: ...

class VerifyProgress(_message.Message):
    __slots__ = ("num_checked", "num_total", "num_bytes", "bad_hashes")
    NUM_CHECKED_FIELD_NUMBER: _ClassVar[int]
    NUM_TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    BAD_HASHES_FIELD_NUMBER: _ClassVar[int]
    num_checked: int
    num_total: int
    num_bytes: int
    bad_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, num_checked: _Optional[int] = ..., num_total: _Optional[int] = ..., num_bytes: _Optional[int] = ..., bad_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("hashes", "all")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    all: bool
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., all: _Optional[bool] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_evicted", "num_leased", "num_absent")
    NUM_EVICTED_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    NUM_ABSENT_FIELD_NUMBER: _ClassVar[int]
    num_evicted: int
    num_leased: int
    num_absent: int
    def __init__(self, num_evicted: _Optional[int] = ..., num_leased: _Optional[int] = ..., num_absent: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("hashes", "wait_ms", "shared_memory", "shared_memory_token")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    wait_ms: int
    shared_memory: bool
    shared_memory_token: bytes
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., wait_ms: _Optional[int] = ..., shared_memory: _Optional[bool] = ..., shared_memory_token: _Optional[bytes] = ...) -> None: ...

class PutSummary(_message.Message):
    __slots__ = ("num_stored", "num_known")
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    num_stored: int
    num_known: int
    def __init__(self, num_stored: _Optional[int] = ..., num_known: _Optional[int] = ...) -> None: ...
