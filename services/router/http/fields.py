"""Members of a JSON object, each with the type that it must have."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, overload

from flashmesh.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

T = TypeVar("T", bool, int, float, str)

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


def parse_object(body: bytes) -> dict[str, Any]:
    """Reads a request's body.

    Raises:
        InvalidRequest: it is not one JSON object in UTF-8.
    """
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply") from error
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {_name(value)}")
    if b"\\ud" in body or b"\\uD" in body:  # only an escape can spell half a pair
        _check_pairs(value)
    return value


@overload
def take(body: Mapping[str, Any], name: str, kind: type[T]) -> T | None: ...
@overload
def take(body: Mapping[str, Any], name: str, kind: type[T], default: T) -> T: ...
def take(body: Mapping[str, Any], name: str, kind: type[T], default: T | None = None) -> T | None:
    """Returns a member, or the default where it is absent or null.

    Raises:
        InvalidRequest: it has another type.
    """
    value = body.get(name)
    if value is None:
        return default
    if kind is float and type(value) is int and abs(value) < 2**53:
        value = float(value)
    if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
        raise InvalidRequest(f"{name} must be {_WORDS[kind]}, not {_name(value)}")
    return value


def take_ids(body: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Returns a list of token ids; empty where it is absent.

    Raises:
        InvalidRequest: it is something else.
    """
    value = body.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise InvalidRequest(f"{name} must be a list of token ids")
    return tuple(value)


def _name(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case float() if not math.isfinite(value):
            return "an infinite number"
        case _:
            return _WORDS[type(value)]


def _check_pairs(value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest("a string has one half of a surrogate pair") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
