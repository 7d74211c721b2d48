"""B4: nothing of a stop string gets out, nothing else is held back longer than needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot_engine.core.ids import TokenId
from kvpilot_engine.errors import InvalidRequestError
from kvpilot_engine.text.output_text import OutputText
from kvpilot_engine.text.stop_strings import StopStringMatcher
from kvpilot_engine.text.testing import make_tokenizer

SHORT_TEXTS = st.text(alphabet="ab", min_size=1, max_size=4)


def _ids(raw: bytes) -> list[TokenId]:
    return [TokenId(byte) for byte in raw]


def _run(stop_strings: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """Return what went out after each piece (the flush last) and what matched."""
    matcher = StopStringMatcher(stop_strings)
    out = []
    for piece in pieces:
        result = matcher.push(piece)
        out.append(result.text)
        if result.matched is not None:
            return out, result.matched
    return [*out, matcher.flush()], None


def _cut_naively(stop_strings: list[str], text: str) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stop_strings", "expected", "matched"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["GH", "DEFX"], "ABCDEF", "GH"),
        (["DEFX"], "ABCDEFGHIJKL", None),
        (["KLM"], "ABCDEFGHIJKL", None),
        (["L"], "ABCDEFGHIJK", "L"),
        (["ABC"], "", "ABC"),
        ([], "ABCDEFGHIJKL", None),
    ],
)
@pytest.mark.parametrize("piece_length", [1, 2, 3, 5, 12])
def test_the_text_before_the_stop_string_and_nothing_more(  # B4
    stop_strings: list[str], expected: str, matched: str | None, piece_length: int
) -> None:
    text = "ABCDEFGHIJKL"
    pieces = [text[start : start + piece_length] for start in range(0, len(text), piece_length)]
    out, found = _run(stop_strings, pieces)
    assert ("".join(out), found) == (expected, matched)


def test_only_the_longest_possible_beginning_is_held() -> None:  # B4
    assert _run(["DEFX"], list("ABCDEFGDE")) == (["A", "B", "C", "", "", "", "DEFG", "", "", "DE"], None)


def test_a_stop_string_that_overlaps_itself_is_found_later_in_its_own_beginning() -> None:
    assert _run(["aab"], list("aaab")) == (["", "", "a", ""], "aab")


def test_the_one_complete_first_wins_and_of_two_ending_together_the_longer() -> None:
    assert _run(["bcd", "bc"], ["abcd"]) == (["a"], "bc")
    assert _run(["c", "bc"], ["abc"]) == (["a"], "bc")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as error:
        StopStringMatcher(["a", ""])
    assert error.value.param == "stop"


@given(st.lists(SHORT_TEXTS, max_size=4), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
def test_agrees_with_a_search_in_the_whole_text_however_it_was_cut(stop_strings: list[str], pieces: list[str]) -> None:
    out, matched = _run(stop_strings, pieces)
    assert ("".join(out), matched) == _cut_naively(stop_strings, "".join(pieces))


@given(st.lists(SHORT_TEXTS, max_size=4), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
def test_no_character_is_held_that_could_go(stop_strings: list[str], pieces: list[str]) -> None:
    matcher = StopStringMatcher(stop_strings)
    seen = sent = ""
    for piece in pieces:
        result = matcher.push(piece)
        if result.matched is not None:
            break
        seen, sent = seen + piece, sent + result.text
        held = seen.removeprefix(sent)
        candidates = (seen[start:] for start in range(len(seen)))
        longest = next((end for end in candidates if any(stop.startswith(end) for stop in stop_strings)), "")
        assert held == longest


def test_output_text_matches_across_tokens_and_characters() -> None:  # B4
    tokenizer = make_tokenizer(merged=["x한".encode()[:2], "한국".encode()[1:]])
    output = OutputText(tokenizer, ["한국"])
    ids = tokenizer.encode("a한국b", specials_as_text=True)
    results = [output.push([i]) for i in ids]
    assert "".join(result.text for result in results[:-1]) == "a"
    assert [result.matched for result in results if result.matched] == ["한국"]


def test_output_text_gives_what_is_held_at_the_end() -> None:
    output = OutputText(make_tokenizer(), ["bX"])
    assert output.push(_ids(b"ab\xed")).text == "a"
    assert output.finish().text == "b\ufffd"


def test_the_end_of_the_output_can_complete_a_stop_string() -> None:
    output = OutputText(make_tokenizer(), ["\ufffd"])
    assert output.push(_ids(b"ab\xed")).text == "ab"
    assert output.finish().matched == "\ufffd"
