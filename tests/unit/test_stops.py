"""Stop strings: found over any cut of the text, trimmed exactly, and nothing held back for longer than needed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashmesh.errors import InvalidRequest
from flashmesh.stops import StopMatcher, StoppedText, check_stops

letters = st.text("ab<", max_size=30)
stop_lists = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


def naive(text, stops, include):
    """The shown text and the matched string, from the definition."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def cut(text, places):
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=letters, stops=stop_lists, places=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_cut_gives_what_a_search_of_the_whole_text_gives(text, stops, places, include):
    matcher = StopMatcher(stops, include=include)
    shown = "".join(matcher.push(piece) for piece in cut(text, places)) + matcher.finish()
    assert (shown, matcher.matched) == naive(text, stops, include)


@given(text=letters, stops=stop_lists)
def test_only_what_may_still_become_a_stop_string_is_held(text, stops):
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.matched is None:
        held = text[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)
        longer = [text[len(text) - n :] for n in range(len(held) + 1, len(text) + 1)]
        assert not any(stop != end and stop.startswith(end) for stop in stops for end in longer)


def test_the_match_that_ends_first_wins():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xab") == "x"
    assert matcher.push("cd") == "a"
    assert matcher.matched == "bc"
    assert matcher.push("more") == ""


class Letters:
    """Each token is a letter, and every third one comes with the next."""

    def __init__(self):
        self.kept = ""

    def push(self, tokens):
        text = self.kept + "".join(chr(token) for token in tokens)
        self.kept = text if text.endswith("~") else ""
        return "" if self.kept else text

    def finish(self):
        return self.kept


def test_the_token_that_completes_a_stop_string_is_the_last_one_that_counts():
    text = StoppedText(Letters(), ["END"])
    assert text.push([ord(letter) for letter in "abE"]) == ("ab", 3)
    assert text.push([ord(letter) for letter in "NDxyz"]) == ("", 2)
    assert text.matched == "END"
    assert text.finish() == ""


def test_what_was_held_comes_out_at_the_end():
    text = StoppedText(Letters(), ["E~ND"])
    assert text.push([ord(letter) for letter in "aE~"]) == ("a", 3)
    assert text.finish() == "E~"
    assert text.matched is None


def test_an_included_stop_string_ends_the_text():
    text = StoppedText(Letters(), ["E"], include=True)
    assert text.push([ord(letter) for letter in "aEx"]) == ("aE", 2)


def test_every_unusable_stop_string_is_named():
    with pytest.raises(InvalidRequest, match="at most 16.*string 0.*string 17"):
        check_stops(["", *"abcdefghijklmnop", "x" * 257])
    check_stops(["\n", "x" * 256])
