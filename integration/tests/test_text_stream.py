"""Text that is shown while it is generated."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers

from trainwright.integration.data.learned import train_bpe
from trainwright.integration.data.tokenizer import ByteTokenizer
from trainwright.integration.text_stream import TextStream

BYTES = ByteTokenizer()


@given(st.lists(st.text(max_size=3).map(str.encode) | st.binary(max_size=3)).map(b"".join))
@example(b"\xff\xff\xff\xc3\xa9")
@example("é\N{REPLACEMENT CHARACTER}".encode())
@example(b"\xf0\x9f\x98")
def test_pieces_add_up_to_the_whole_text_and_split_no_character(content: bytes) -> None:
    stream = TextStream(BYTES.decode)

    pieces = [stream.add(byte) for byte in content]

    assert "".join(pieces) + stream.end() == BYTES.decode(list(content))


def test_a_character_is_shown_when_its_last_byte_comes() -> None:
    stream = TextStream(BYTES.decode, b"context")

    assert [stream.add(byte) for byte in "aé😀".encode()] == ["a", "", "é", "", "", "", "😀"]
    assert stream.end() == ""


def test_spaces_that_depend_on_the_token_before_are_shown_once() -> None:
    # A decoder that drops the space before the first word, as those of SentencePiece do.
    words = {"▁the": 0, "▁law": 1, "s": 2, ".": 3, "<unk>": 4}
    library = Library(models.WordLevel(words, unk_token="<unk>"))
    library.normalizer = normalizers.Prepend("▁")
    library.decoder = decoders.Metaspace()
    stream = TextStream(library.decode, [0])

    shown = [stream.add(token) for token in (1, 2, 0, 1, 3)]

    assert shown == [" law", "s", " the", " law", "."]


@pytest.mark.parametrize("text", ["naïve 😀 café\n", "日本語 and 日本"])
def test_pieces_of_a_byte_pair_encoding_add_up(text: str) -> None:
    tokenizer = train_bpe([text.encode() * 3], 262)
    (tokens,) = tokenizer.encode([text.encode()])
    stream = TextStream(tokenizer.decode)

    assert "".join(stream.add(int(token)) for token in tokens) + stream.end() == text
