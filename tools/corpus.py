"""Real text that every machine has: the top-level modules of Python's own standard library, as bytes."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SEPARATOR = 256  # stands before each file; 0..255 are the bytes themselves
VOCAB_SIZE = 264  # 257 tokens, rounded up to a multiple of 8 for the matrix products


def read_corpus(folder: Path | None = None, *, max_tokens: int = 2**20) -> Tensor:
    """The `*.py` of `folder` (default: the standard library) in the order of their names, as int16[tokens].

    Stops at `max_tokens`, so that the text does not dwarf a small model in the memory figures. Raises
    ValueError when the folder holds no such file.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise ValueError(f"folder: expected Python source files, got none in {folder}")
    text = bytearray()
    separators = []
    for path in paths:
        separators.append(len(text))
        text += b"\0" + path.read_bytes()
        if len(text) >= max_tokens:
            break
    tokens = torch.frombuffer(text, dtype=torch.uint8).to(torch.int16)
    tokens[separators] = SEPARATOR
    return tokens[:max_tokens].clone()


def token_batches(corpus: Tensor, *, batch: int, seq: int, seed: int, rank: int) -> Iterator[Tensor]:
    """Endless int64[batch, seq] windows of `corpus`: the same for the same seed and rank, in any program."""
    if corpus.numel() <= seq:
        raise ValueError(f"seq: expected fewer than the corpus's {corpus.numel()} tokens, got {seq}")
    generator = torch.Generator().manual_seed(seed * 65536 + rank)
    offsets = torch.arange(seq)
    while True:
        starts = torch.randint(corpus.numel() - seq, (batch, 1), generator=generator)
        yield corpus[starts + offsets].long()
