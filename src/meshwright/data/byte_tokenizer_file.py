"""The byte tokenizer as a `tokenizer.json`, so that other programs open it."""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from meshwright.data.tokenize import BYTE_EOS_ID

BYTE_EOS_TOKEN = "<|endoftext|>"


def byte_tokenizer_json() -> bytes:
    """A byte-level BPE without merges: token b is byte b, and 256 is the end of a document."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    tokenizer = FastTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    assert tokenizer.add_special_tokens([AddedToken(BYTE_EOS_TOKEN, special=True)]) == 1
    assert tokenizer.token_to_id(BYTE_EOS_TOKEN) == BYTE_EOS_ID
    return tokenizer.to_str(pretty=False).encode()


def _byte_symbols() -> list[str]:
    """The printable character that byte-level BPE uses for each byte, by byte."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
