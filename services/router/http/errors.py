"""Errors as the two providers shape them.

    ClientGoneError           nobody is left to be told
    HttpError                 what only HTTP knows: route, method, media type, size
    dr.ConversionError        the provider's own text for a conversation that it does not take
    flashmesh.errors          everything below the door

`describe` turns any of them into a `Problem`, which says what the client may know; `Problem.body` writes it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import deepseek_recipe as dr

from flashmesh import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

RETRY_AFTER_S = 1

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ClientGoneError(Exception):
    """The connection is gone, or nobody has read from it for too long."""


class HttpError(Exception):
    """A request that fails before any service sees it."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Problem:
    """What the client gets instead of an answer.

    Attributes:
        code: OpenAI's short name, where there is one.
        original: a body in the provider's own words; written as it is.
    """

    status: int
    message: str
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    original: str = ""

    def body(self, *, anthropic: bool, request_id: str) -> bytes:
        """Returns the JSON text."""
        if self.original:
            return self.original.encode()
        if anthropic:
            return dump(
                {
                    "type": "error",
                    "error": {
                        "type": _ANTHROPIC_TYPES.get(
                            self.status, _family(self.status, "api_error")
                        ),
                        "message": self.message,
                    },
                    "request_id": request_id,
                }
            )
        kind = _OPENAI_TYPES.get(self.status, _family(self.status, "server_error"))
        return dump(
            {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}
        )


def describe(error: BaseException) -> Problem:
    """Says what a client may know of an error; what is not expected becomes 500 without a word of it."""
    retry = {"retry-after": str(RETRY_AFTER_S)}
    match error:
        case HttpError():
            return Problem(error.status, str(error), headers=error.headers)
        case dr.ConversionError():
            return Problem(error.status_code, "", original=error.body)
        case errors.UnknownModel():
            return Problem(404, str(error), "model_not_found")
        case errors.PromptTooLong():
            return Problem(400, str(error), "context_length_exceeded")
        case errors.InvalidRequest():
            return Problem(400, str(error), "invalid_request_error")
        case errors.Unauthenticated():
            return Problem(401, str(error), "invalid_api_key", {"www-authenticate": "Bearer"})
        case errors.QuotaExceeded():
            wait = {"retry-after": str(math.ceil(error.retry_after_s))}
            return Problem(429, str(error), "rate_limit_exceeded", wait)
        case errors.Overloaded():
            return Problem(429, "too many requests; try again later", "rate_limit_exceeded", retry)
        case errors.DeadlineExceeded():
            return Problem(504, "the deadline has passed", "deadline_exceeded")
        case (
            errors.WorkerLost()
            | errors.Draining()
            | errors.StaleEpoch()
            | errors.BlockNotFound()
            | errors.CorruptBlock()
        ):
            text = "no worker can answer now; try again later"
            return Problem(503, text, "service_unavailable", retry)
        case _:
            return Problem(500, "internal error; the service's log has it under the request id")


def dump(value: object) -> bytes:
    """Writes JSON the short way."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _family(status: int, server: str) -> str:
    return "invalid_request_error" if status < 500 else server
