"""Operands of an instruction, parsed from nvdisasm's text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..errors import UnknownInstruction

_INTEGER = re.compile(r"[-+]?(0x[0-9a-fA-F]+|\d+)")
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?|INF|QNAN|SNAN|\.\d+)", re.I)
_REGISTER = re.compile(r"(R\d+|RZ)((?:\.\w+)*)")
_CONSTANT = re.compile(r"c\[(0x[0-9a-f]+)\]\s*\[(.*?)\]((?:\.\w+)*)")
_INDEXED = re.compile(r"(R\d+|RZ)(?:\+(-?0x[0-9a-f]+))?")
PT = 7


@dataclass
class Operand:
    """One operand.

    kind: reg, pred, const, mem, sr, bar, label, labelimm, imm, fimm, himm (a pair of halves).
    n: register or predicate number; None is RZ.  suffixes: what follows a dot, .reuse aside.
    """

    kind: str
    text: str
    n: int | None = None
    neg: bool = False
    abs: bool = False
    inv: bool = False
    not_: bool = False
    suffixes: list[str] = field(default_factory=list)
    imm: int = 0
    value: float = 0.0
    bank: int = 0
    offset: int = 0
    index: int | None = None
    indexed: bool = False
    scale: int = 1

    @property
    def is_zero(self) -> bool:
        """RZ."""
        return self.kind == "reg" and self.n is None

    def plain(self) -> Operand:
        """The operand without sign, inversion and suffixes."""
        bare = Operand(self.kind, self.text)
        bare.n, bare.imm, bare.value, bare.bank = self.n, self.imm, self.value, self.bank
        bare.offset, bare.index, bare.indexed = self.offset, self.index, self.indexed
        bare.scale = self.scale
        return bare


def is_number(text: str) -> bool:
    """Whether the text is an integer or a float literal."""
    text = text.strip()
    return bool(_INTEGER.fullmatch(text) or _FLOAT.fullmatch(text))


def number(text: str) -> float:
    """The value of a literal; quiet and signalling NaN alike."""
    return float(text.strip().lower().replace("qnan", "nan").replace("snan", "nan"))


def _register_number(text: str) -> int | None:
    return None if text == "RZ" else int(text[1:])


def _suffixes(text: str) -> list[str]:
    return [s for s in text.split(".") if s and s != "reuse"]


def _memory(op: Operand, inner: str) -> Operand:
    base = False
    for part in re.split(r"\+(?=[R0-9\-U])", inner):
        if m := _REGISTER.fullmatch(part):
            if base:
                raise UnknownInstruction(f"memory operand {op.text}")
            base, op.n = True, _register_number(m.group(1))
            for s in _suffixes(m.group(2)):
                if s in ("X4", "X8", "X16"):
                    op.scale = int(s[1:])
                elif s in ("U32", "64"):
                    op.suffixes.append(s)
                else:
                    raise UnknownInstruction(f"memory operand {op.text}")
        elif re.fullmatch(r"-?0x[0-9a-f]+", part):
            op.offset += int(part, 16)
        else:
            raise UnknownInstruction(f"memory operand {op.text}")
    return op


def _constant(op: Operand, m: re.Match) -> Operand:
    op.bank, op.suffixes = int(m.group(1), 16), _suffixes(m.group(3))
    if i := _INDEXED.fullmatch(m.group(2)):
        op.indexed, op.index = True, _register_number(i.group(1))
        op.offset = int(i.group(2), 16) if i.group(2) else 0
    else:
        op.offset = int(m.group(2), 16)
    return op


def parse(text: str) -> Operand:
    """Parse one operand.  Raises UnknownInstruction for a form that is not known."""
    op = Operand("", text)
    s = text.strip()
    while s and s[0] in "-~!|+":
        if s[0] == "-":
            if is_number(s):
                break
            op.neg = True
        op.inv |= s[0] == "~"
        op.not_ |= s[0] == "!"
        op.abs |= s[0] == "|"
        s = s[1:]
    if op.abs:
        s = s.replace("|", "")
    if m := _REGISTER.fullmatch(s):
        op.kind, op.n, op.suffixes = "reg", _register_number(m.group(1)), _suffixes(m.group(2))
    elif re.fullmatch(r"P\d|PT", s):
        op.kind, op.n = "pred", PT if s == "PT" else int(s[1:])
    elif m := _CONSTANT.fullmatch(s):
        op.kind = "const"
        _constant(op, m)
    elif s.startswith("["):
        op.kind = "mem"
        _memory(op, s[1:-1])
    elif s.startswith("SR") or s == "PR":
        op.kind = "sr"
    elif m := re.fullmatch(r"B(\d+)", s):
        op.kind, op.n = "bar", int(m.group(1))
    elif m := re.fullmatch(r"SB(\d+)", s):
        op.kind, op.n = "scoreboard", int(m.group(1))
    elif m := re.fullmatch(r"`\((.*)\)", s):
        op.kind, op.text = "label", m.group(1)
    elif _INTEGER.fullmatch(s):
        op.kind, op.imm = "imm", int(s, 0)
    elif _FLOAT.fullmatch(s):
        op.kind, op.value = "fimm", number(s)
    elif m := re.fullmatch(r"(\d+)@(lo|hi)\((.*)\)", s):
        op.kind, op.text, op.suffixes = "labelimm", m.group(3), [m.group(2)]
    else:
        raise UnknownInstruction(f"operand {text}")
    return op
