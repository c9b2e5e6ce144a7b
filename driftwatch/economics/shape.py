"""What a window of proposals makes an engine do: how many passes of the draft, and how many tokens to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["chain", "block", "tree"]
NUMBERS = ("steps", "topk", "tokens")


@dataclass(frozen=True)
class Shape:
    """``chain``: a pass of the draft a proposal (causal models, EAGLE, MTP). ``block``: one pass makes all of them,
    however many are asked for (DFlash, Domino, P-EAGLE). ``tree``: a pass a level of ``topk`` nodes, and ``tokens``
    less the root to verify (SGLang's three numbers); its proposal length is its levels and no other."""

    kind: Kind = "chain"
    steps: int = 0
    topk: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        if (self.kind == "tree") != (min(self.steps, self.topk, self.tokens) > 0):
            raise ValueError("`steps`, `topk` and `tokens` belong to a tree, and are at least 1")

    @classmethod
    def of(cls, text: str) -> Shape:
        """``chain``, ``block``, or a tree as ``steps=5,topk=4,tokens=8``. Raises ValueError for anything else."""
        if text == "chain":
            return cls()
        if text == "block":
            return cls("block")
        pairs = [[piece.strip() for piece in part.partition("=")[::2]] for part in text.split(",")]
        whole = all(value.isascii() and value.isdigit() and len(value) < 6 for _, value in pairs)
        if not whole or sorted(name for name, _ in pairs) != sorted(NUMBERS):
            raise ValueError(f"shape {text!r}: write chain, block, or steps=5,topk=4,tokens=8")
        given = {name: int(value) for name, value in pairs}
        return cls("tree", *(given[name] for name in NUMBERS))

    @classmethod
    def of_draft(cls, spec: str) -> Shape | None:
        """The tree that a draft's name asks for, ``folder:steps=5,topk=4,tokens=8``; None where it asks for none."""
        body = split_draft(spec)[1]
        try:
            return cls.of(body) if body else None
        except ValueError:
            return None

    def __str__(self) -> str:
        numbers = ",".join(f"{name}={getattr(self, name)}" for name in NUMBERS)
        return numbers if self.kind == "tree" else self.kind

    @property
    def described(self) -> str:
        return f"a tree of {self}" if self.kind == "tree" else f"a {self.kind}"

    def passes(self, gamma: float) -> float:
        """Passes of the draft in a window of ``gamma`` proposals."""
        return {"chain": gamma, "block": 1.0, "tree": float(self.steps)}[self.kind]

    def verified(self, gamma: float) -> float:
        """Tokens that its verification feeds beside the last one that was accepted."""
        return float(self.tokens - 1) if self.kind == "tree" else gamma


def split_draft(spec: str) -> tuple[str, str]:
    """A draft's folder and the text of the tree that its name asks for, ``folder:steps=5,topk=4,tokens=8``; the name
    and nothing where it asks for none. A folder may really be called so, and ``ngram:min=1,max=3`` looks alike: whoever
    can tell looks first."""
    folder, _, body = spec.rpartition(":")
    return (folder, body) if folder and "=" in body and "/" not in body else (spec, "")


CHAIN = Shape()
