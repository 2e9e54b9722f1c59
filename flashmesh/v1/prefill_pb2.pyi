from flashmesh.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "hit_tokens", "chain", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hit_tokens: int
    chain: _types_pb2.BlockChain
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., hit_tokens: _Optional[int] = ..., chain: _Optional[_Union[_types_pb2.BlockChain, _Mapping]] = ..., priority: _Optional[int] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("stored_blocks",)
    STORED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    stored_blocks: int
    def __init__(self, stored_blocks: _Optional[int] = ...) -> None: ...
