"""Dataclasses to protobuf and back, both directions side by side."""

from __future__ import annotations

import dataclasses

from flashmesh.errors import InvalidRequest
from flashmesh.types import FinishReason, GrammarKind, GrammarSpec, SamplingParams
from flashmesh.v1 import types_pb2

_FINISH = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}

_KIND = {kind: types_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KIND_BACK = {number: kind for kind, number in _KIND.items()}

_PACKED = ("stop_token_ids", "logit_bias", "grammar")
"""Fields that the wire holds in another shape than the dataclass."""


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Packs every field."""
    fields = {
        field.name: getattr(params, field.name)
        for field in dataclasses.fields(SamplingParams)
        if field.name not in _PACKED
    }
    return types_pb2.SamplingParams(
        **fields,
        stop_token_ids=params.stop_token_ids,
        logit_bias=dict(params.logit_bias),
        grammar=_grammar_to_proto(params.grammar) if params.grammar else None,
    )


def sampling_from_proto(message: types_pb2.SamplingParams) -> SamplingParams:
    """Unpacks and validates; absent fields take their defaults.

    Raises:
        InvalidRequest: lists every value that is out of range.
    """
    given = {
        field.name: getattr(message, field.name)
        for field in dataclasses.fields(SamplingParams)
        if field.name not in _PACKED and message.HasField(field.name)
    }
    return SamplingParams(
        **given,
        stop_token_ids=tuple(message.stop_token_ids),
        logit_bias=tuple(sorted(message.logit_bias.items())),
        grammar=_grammar_from_proto(message.grammar) if message.HasField("grammar") else None,
    )


def _grammar_to_proto(spec: GrammarSpec) -> types_pb2.Grammar:
    return types_pb2.Grammar(kind=_KIND[spec.kind], text=spec.text, start_after=spec.start_after)


def _grammar_from_proto(message: types_pb2.Grammar) -> GrammarSpec:
    if message.kind not in _KIND_BACK:
        raise InvalidRequest(f"grammar kind {message.kind} is not known")
    return GrammarSpec(
        kind=_KIND_BACK[message.kind],
        text=message.text,
        start_after=message.start_after if message.HasField("start_after") else None,
    )


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
