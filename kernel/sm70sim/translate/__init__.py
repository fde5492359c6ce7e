"""Translates a kernel of a cubin to C++: one function per block of straight-line code."""

from __future__ import annotations

from dataclasses import dataclass

from ..cubin import Kernel
from ..errors import UnknownInstruction
from . import ops
from .emitter import OPS, Emitter, Info
from .operands import parse

__all__ = ["OPS", "Translation", "translate"]

_HEADERS = ("atomics.h", "double.h", "hmma.h", "integer.h", "lanes.h")


@dataclass
class Translation:
    """C++ source, the highest register used, first instruction of each block, facts per
    instruction."""

    source: str
    maxreg: int
    starts: list[int]
    info: list[Info]


def _block_starts(kernel: Kernel) -> set[int]:
    """Addresses at which a block starts: branch targets, and what follows a branch."""
    starts, end = {0}, len(kernel.instrs) * 16
    for ins in kernel.instrs:
        if ins.op in ("BRA", "CALL", "JMP"):
            target = parse(ins.args[-1])
            if target.kind == "label" and target.text in kernel.labels:
                starts.add(kernel.labels[target.text])
            elif target.kind == "imm":
                starts.add(target.imm)
        if ins.op in ops.control.ENDS_BLOCK:
            starts.add(ins.pc + 16)
    if any(ins.op in ("BRX", "JMX") for ins in kernel.instrs):
        starts |= set(kernel.labels.values())  # a computed branch goes to some label
    return {s for s in starts if s < end}


def translate(kernel: Kernel, const_sizes: dict[int, int]) -> Translation:
    """Translate a kernel; const_sizes: bytes of each constant bank.

    Raises UnknownInstruction naming kernel, address and text.
    """
    emitter = Emitter(kernel, const_sizes)
    starts = sorted(_block_starts(kernel))
    start_set, body, info = set(starts), [], []
    for ins in kernel.instrs:
        try:
            code = emitter.translate(ins)
        except UnknownInstruction as error:
            raise UnknownInstruction(
                f'{kernel.name} at 0x{ins.pc:x}: "{ins.text}": {error}'
            ) from None
        except (IndexError, KeyError, AttributeError, TypeError, ValueError) as error:
            raise UnknownInstruction(
                f'{kernel.name} at 0x{ins.pc:x}: "{ins.text}": unexpected form '
                f"({type(error).__name__}: {error})"
            ) from error
        if ins.pc in start_set:
            if ins.pc:
                body.append(f"w.pc=0x{ins.pc:x}u; return act; }}")
            body.append(
                f"static u32 b_{ins.pc:x}(Ctx &c, Warp &w, u32 act) {{"
                " Row *const R = w.R; (void)R; (void)c;"
            )
        body += [f"// {ins.pc:04x} {ins.text}", code]
        info.append(emitter.info)
    body.append('fault("ran past the end of the kernel"); }')
    if missing := emitter.address_taken - start_set:
        raise UnknownInstruction(
            f"{kernel.name}: the address of 0x{min(missing):x} is taken, where no block starts"
        )
    lines = [f'#include "{h}"' for h in _HEADERS]
    lines += ["#define CB(bank, offset) (*(const u32 *)(c.cb[bank] + (offset)))", *body]
    texts = (i.text.replace("\\", "\\\\").replace('"', '\\"') for i in kernel.instrs)
    lines += ["const char *const kernel_text[] = {", *(f'"{t}",' for t in texts), "};"]
    ends = [*starts[1:], len(kernel.instrs) * 16]
    blocks = ",".join(
        f"{{b_{a:x},0x{a:x},{(b - a) // 16}}}" for a, b in zip(starts, ends, strict=True)
    )
    lines += [
        f"const Block kernel_blocks[] = {{{blocks}}};",
        f"const u32 kernel_nblocks = {len(starts)}, kernel_ninstrs = {len(kernel.instrs)};",
        "",
    ]
    return Translation("\n".join(lines), emitter.maxreg, starts, info)
