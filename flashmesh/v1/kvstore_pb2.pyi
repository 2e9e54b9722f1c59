from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

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
    __slots__ = ("node_id", "epoch", "num_blocks", "capacity_bytes", "leased_bytes", "evictable_bytes", "num_leases", "num_waiting_gets")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTABLE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_GETS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    epoch: bytes
    num_blocks: int
    capacity_bytes: int
    leased_bytes: int
    evictable_bytes: int
    num_leases: int
    num_waiting_gets: int
    def __init__(self, node_id: _Optional[str] = ..., epoch: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., capacity_bytes: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., evictable_bytes: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_waiting_gets: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("hashes", "wait_ms")
    HASHES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    wait_ms: int
    def __init__(self, hashes: _Optional[_Iterable[bytes]] = ..., wait_ms: _Optional[int] = ...) -> None: ...

class PutSummary(_message.Message):
    __slots__ = ("num_stored", "num_known")
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    num_stored: int
    num_known: int
    def __init__(self, num_stored: _Optional[int] = ..., num_known: _Optional[int] = ...) -> None: ...
