"""Reviews of a .parquet file as tokens, for studies that train on them."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.lab.measure.pretrained import Pretrained

SHORTEST_TOKEN = 3  # characters: a shorter text is not worth tokenizing


class Reviews(NamedTuple):
    """Reviews of a split, padded."""

    tokens: Tensor  # (reviews, n)
    mask: Tensor  # (reviews, n), True = real
    labels: Tensor  # (reviews,)

    def take(self, index: Tensor) -> "Reviews":
        """Some of them."""
        return Reviews(*(x[index] for x in self))


def read_rows(path: Path) -> list[tuple[str, int, str]]:
    """Split, label and text of each row."""
    from pyarrow import ArrowInvalid, parquet

    try:
        columns = parquet.read_schema(path).names
        missing = [name for name in ("split", "label", "text") if name not in columns]
        if missing:
            raise ValueError(f"{path} has the columns {', '.join(columns)}; it lacks {', '.join(missing)}")
        table = parquet.read_table(path, columns=["split", "label", "text"]).to_pydict()
    except ArrowInvalid as error:
        raise ValueError(f"{path} is not a .parquet file: {error}") from error
    rows = list(zip(table["split"], table["label"], table["text"], strict=True))
    for number, (_, label, text) in enumerate(rows, start=1):
        if label not in (0, 1) or not isinstance(text, str):
            raise ValueError(
                f"{path}, row {number}: label {label!r} and {type(text).__name__}; expected 0 or 1, a text"
            )
    return rows


def tokenize(pretrained: Pretrained, rows: Sequence[tuple[str, int, str]], n: int, min_tokens: int) -> Reviews:
    """The reviews that have `min_tokens` tokens, cut after n and padded to it."""
    tokenizer = pretrained.tokenizer
    long = [row for row in rows if len(row[2]) >= SHORTEST_TOKEN * min_tokens]
    texts = [text.replace("<br />", " ") for _, _, text in long]
    found = tokenizer(texts, truncation=True, max_length=n, verbose=False)["input_ids"] if texts else []
    kept = [(tokens, row[1]) for tokens, row in zip(found, long, strict=True) if len(tokens) >= min_tokens]
    tokens = torch.full((len(kept), n), int(tokenizer.pad_token_id))
    mask = torch.zeros(len(kept), n, dtype=torch.bool)
    for row, (ids, _) in enumerate(kept):
        tokens[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = True
    return Reviews(tokens, mask, torch.tensor([label for _, label in kept], dtype=torch.long))
