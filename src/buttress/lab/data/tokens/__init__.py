"""Token folders: tokenized text in memory-mapped files. `write` creates them, `read` opens them.

A token folder holds `train.bin` and `val.bin` (little endian, two bytes per token where the vocabulary fits into them,
else four), `tokenizer.json` (as the `tokenizers` library writes it) and `tokens.json`, which describes them.
Every document is followed by the end-of-text token, which occurs nowhere else: a special token that is spelled out in a
text is tokenized like any other characters.
"""

from buttress.lab.data.tokens.folder import Tokens, about, read
from buttress.lab.data.tokens.progress import Progress
from buttress.lab.data.tokens.writing import write

__all__ = ["Progress", "Tokens", "about", "read", "write"]
