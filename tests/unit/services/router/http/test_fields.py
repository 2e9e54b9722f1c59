"""Bodies and their members."""

import pytest

from flashmesh.errors import InvalidRequest
from flashmesh.services.router.http.fields import parse_object, take, take_ids


def test_a_whole_pair_of_escapes_and_a_null_character_are_text():
    assert parse_object(b'{"a": "\\ud83d\\ude00\\u0000"}') == {"a": "😀\x00"}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "must be a JSON object, not a list"),
        (b"null", "not null"),
        (b"\xff{}", r"not UTF-8 \(byte 0\)"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"\\uDE00\\uD83D": 1}', "half of a surrogate pair"),
        (b'{"a": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not JSON"),
        (b'{"a": "raw\x01"}', "not JSON"),
    ],
)
def test_what_is_no_object_is_refused(body, text):
    with pytest.raises(InvalidRequest, match=text):
        parse_object(body)


def test_absent_and_null_take_the_default():
    assert take({}, "a", int) is None
    assert take({"a": None}, "a", int, 3) == 3


def test_a_whole_number_is_a_number():
    assert take({"a": 2}, "a", float, 0.0) == 2.0


@pytest.mark.parametrize(
    ("value", "kind"),
    [(True, int), (1, bool), (1.5, int), ("1", int), (float("inf"), float), (10**400, float)],
)
def test_another_type_is_refused(value, kind):
    with pytest.raises(InvalidRequest, match="a must be "):
        take({"a": value}, "a", kind)


@pytest.mark.parametrize("value", [1, ["1"], [True], {}])
def test_ids_are_a_list_of_whole_numbers(value):
    with pytest.raises(InvalidRequest, match="list of token ids"):
        take_ids({"a": value}, "a")
