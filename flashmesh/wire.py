"""Dataclasses to protobuf and back, both directions side by side."""

from __future__ import annotations

import dataclasses

from flashmesh.errors import InvalidRequest
from flashmesh.types import FinishReason, SamplingParams
from flashmesh.v1 import types_pb2

_FINISH = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Packs every field."""
    return types_pb2.SamplingParams(**dataclasses.asdict(params))


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unpacks and validates; absent fields take their defaults.

    Raises:
        InvalidRequest: a value is out of range.
    """
    given = {
        field.name: getattr(message, field.name)
        for field in dataclasses.fields(SamplingParams)
        if field.name != "stop_token_ids" and message.HasField(field.name)
    }
    return SamplingParams(**given, stop_token_ids=tuple(message.stop_token_ids))


def finish_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason:
    """Packs a finish reason; None becomes UNSPECIFIED."""
    return _FINISH[reason] if reason else types_pb2.FINISH_REASON_UNSPECIFIED


def finish_from_proto(number: types_pb2.FinishReason) -> FinishReason | None:
    """Unpacks a finish reason.

    Raises:
        InvalidRequest: the number is not known.
    """
    if number == types_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    if number not in _FINISH_BACK:
        raise InvalidRequest(f"finish reason {number} is not known")
    return _FINISH_BACK[number]
