"""What is read."""

from __future__ import annotations

import attrs

from trainwright.integration.data.choice import FORMATS, HELD_OUT_SHARE, DataChoice
from trainwright.integration.data.sources.nanogpt import TOKEN_DTYPES
from trainwright.integration.data.tokens import PACKINGS
from trainwright.integration.settings.leaf import leaf
from trainwright.integration.values import not_negative, one_of


@attrs.frozen
class DataSettings:
    """The data.

    Args:
        data: a file or a folder; or several with weights, as in ``web.jsonl@0.7,code@0.3``. None
            means the standard library's source files.
        format: of the data; ``auto`` goes by the names of files.
        text_field: name of the field or column that holds the text.
        chat: whether rows hold conversations under ``messages``, a list of role and content; of
            these the assistant's answers are learnt.
        tokenizer: ``bytes``, ``bpe:N`` for N tokens learnt of the training documents, ``ids:N`` for
            numbers without text, or a ``tokenizer.json`` or its folder; None for that of tokenised
            data, else bytes.
        end_token: name of the token behind each document; None for what the tokenizer says.
        packing: ``stream`` cuts rows that follow each other; ``documents`` does as well, but
            documents do not see each other; ``whole`` begins rows with documents and pads them.
        held_out: path of what is held out; None for a share of the data.
        held_out_share: that share, of documents, or of a single text or file of tokens its end.
        token_dtype: kind of the tokens in nanoGPT's files.
        read_ahead: batches that threads read before they are asked for.
    """

    data: str | None = leaf(
        None, "a file or folder, or PATH@WEIGHT,PATH@WEIGHT (default: Python's standard library)"
    )
    format: str = leaf("auto", f"of the data: {', '.join(FORMATS)}", one_of(FORMATS))
    text_field: str = leaf("text", "field or column that holds the text")
    chat: bool = leaf(False, "rows hold messages, of which the assistant's are learnt")
    tokenizer: str | None = leaf(
        None, "bytes, bpe:N, ids:N, or a tokenizer.json or its folder (default bytes)"
    )
    end_token: str | None = leaf(None, "name of the token behind each document")
    packing: str = leaf("stream", f"documents in rows: {', '.join(PACKINGS)}", one_of(PACKINGS))
    held_out: str | None = leaf(None, "path of what is held out (default: a share of the data)")
    held_out_share: float = leaf(HELD_OUT_SHARE, "share of the data that is held out")
    token_dtype: str = leaf(
        "uint16", f"of nanoGPT's files: {' or '.join(TOKEN_DTYPES)}", one_of(TOKEN_DTYPES)
    )
    read_ahead: int = leaf(2, "batches read before they are asked for", not_negative)

    def __attrs_post_init__(self) -> None:
        # It checks what single values cannot say.
        _ = self.choice

    @property
    def choice(self) -> DataChoice:
        """What to read, and how."""
        values = attrs.asdict(self)
        del values["read_ahead"]
        return DataChoice(**values)
