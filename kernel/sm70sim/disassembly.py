"""Instructions of a cubin: nvdisasm's text for the operands, the raw 128-bit words for
immediates and scheduling control bits."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass

from . import toolchain
from .errors import SimError


@dataclass
class Instr:
    """One instruction.

    pc: byte address.  pred: guard predicate.  opcode: with modifiers; op: without; mods: the
    modifiers.  args: operand texts.  enc: the 128-bit word.  idx: number in the kernel.
    Control bits: stall (cycles before the next issue of the warp), yield_, wbar and rbar
    (scoreboards that a result or the reading of the sources releases; 7: none), wait (mask of
    scoreboards to wait for), reuse (mask of operands kept for the next instruction).
    """

    pc: int
    text: str
    pred: str
    opcode: str
    op: str
    mods: list[str]
    args: list[str]
    enc: int
    idx: int
    stall: int = 0
    yield_: int = 0
    wbar: int = 7
    rbar: int = 7
    wait: int = 0
    reuse: int = 0

    def set_high_word(self, word: int) -> None:
        """Add the upper 64 bits of the encoding, which have the control bits."""
        self.enc |= word << 64
        control = word >> 41
        self.stall, self.yield_ = control & 15, control >> 4 & 1
        self.wbar, self.rbar = control >> 5 & 7, control >> 8 & 7
        self.wait, self.reuse = control >> 11 & 63, control >> 17 & 15


_WORD = r"/\* 0x([0-9a-f]+) \*/"
_ADDRESS = r"\s*/\*([0-9a-f]+)\*/\s+"
_LINE = re.compile(rf"{_ADDRESS}(.*?)\s*;\s*(?:\(\*.*?\*\))?\s*{_WORD}")
_COMPUTED_BRANCH = re.compile(rf"{_ADDRESS}(BRX.*?)\s*\(\*.*\*\)\s*;?\s*{_WORD}")
_SECOND_WORD = re.compile(rf"\s*{_WORD}")
_LABEL = re.compile(r"([.$\w]+):\s*$")
_SECTION = re.compile(r"\s*\.section\s+(\S+?),")
_TEXT = re.compile(r"(?:@(!?U?P[T0-9])\s+)?(\S+)\s*(.*)$")


def _split_args(text: str) -> list[str]:
    """Split at the commas that are outside brackets."""
    out, depth, current = [], 0, ""
    for ch in text:
        depth += (ch in "[(") - (ch in "])")
        if ch == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += ch
    return [*out, current.strip()] if current.strip() else out


def _instr(address: str, text: str, word: str, idx: int) -> Instr:
    text = text.strip()
    pred, opcode, rest = _TEXT.match(text).groups()
    name, *mods = opcode.split(".")
    args = _split_args(rest)
    return Instr(int(address, 16), text, pred or "PT", opcode, name, mods, args, int(word, 16), idx)


def nvdisasm_text(cubin: bytes) -> str:
    """Output of nvdisasm -c -hex."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        command = [str(toolchain.nvdisasm()), "-c", "-hex", f.name]
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise SimError(f"nvdisasm refuses the cubin: {run.stderr.strip()[:500]}")
    return run.stdout


def parse(text: str) -> dict[str, tuple[list[Instr], dict[str, int]]]:
    """Kernel name -> (instructions, label -> address)."""
    kernels: dict[str, tuple[list[Instr], dict[str, int]]] = {}
    current: tuple[list[Instr], dict[str, int]] | None = None
    first_word_only: Instr | None = None
    for line in text.splitlines():
        if m := _SECTION.match(line):
            section = m.group(1).strip('"')
            current = None
            if section.startswith(".text."):
                current = kernels.setdefault(section[6:], ([], {}))
            continue
        if current is None:
            continue
        instrs, labels = current
        if m := _COMPUTED_BRANCH.match(line) or _LINE.match(line):
            first_word_only = _instr(*m.groups(), len(instrs))
            instrs.append(first_word_only)
        elif (m := _SECOND_WORD.match(line)) and first_word_only:
            first_word_only.set_high_word(int(m.group(1), 16))
            first_word_only = None
        elif m := _LABEL.match(line):
            labels[m.group(1)] = len(instrs) * 16
    return kernels
