"""Reads an sm_70 cubin: ELF sections, kernel metadata, constant banks, instructions."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

from . import disassembly
from .disassembly import Instr
from .errors import SimError

# .nv.info attributes that are used here
_PARAM_CBANK = 0x0A
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_KPARAM_INFO = 0x17
_MAX_STACK_SIZE = 0x23

_NOBITS, _SYMTAB = 8, 2
_SM70 = 70


@dataclass
class Kernel:
    """An entry point.

    regs: registers per thread.  static_smem, frame: bytes of static shared and of local memory.
    params: (offset, size) of each parameter from param_base in constant bank 0.
    labels: label -> address.  const: bank -> bytes.
    """

    name: str
    instrs: list[Instr]
    labels: dict[str, int]
    regs: int = 0
    static_smem: int = 0
    frame: int = 0
    params: list[tuple[int, int]] = field(default_factory=list)
    param_base: int = 0x160
    param_size: int = 0
    const: dict[int, bytes] = field(default_factory=dict)


@dataclass
class _Section:
    name: str
    type: int
    size: int
    link: int
    info: int
    data: bytes


@dataclass
class _Symbol:
    name: str
    section: int
    value: int


def _c_string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode()


def _sections(data: bytes) -> list[_Section]:
    if data[:4] != b"\x7fELF":
        raise SimError("not a cubin: it is not an ELF file")
    flags = struct.unpack_from("<I", data, 0x30)[0]
    if flags & 0xFF != _SM70:
        raise SimError(f"not an sm_70 cubin: it is for sm_{flags & 0xFF}")
    offset = struct.unpack_from("<Q", data, 0x28)[0]
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry_size) for i in range(count)
    ]

    def contents(h) -> bytes:
        return b"" if h[1] == _NOBITS else data[h[4] : h[4] + h[5]]

    names = contents(headers[names_index])
    return [_Section(_c_string(names, h[0]), h[1], h[5], h[6], h[7], contents(h)) for h in headers]


def _symbols(sections: list[_Section]) -> list[_Symbol]:
    out = []
    for s in sections:
        if s.type != _SYMTAB:
            continue
        names = sections[s.link].data
        for i in range(s.size // 24):
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", s.data, i * 24)
            out.append(_Symbol(_c_string(names, name), section, value))
    return out


def _attributes(data: bytes):
    """(attribute, payload or number) of an .nv.info section."""
    i = 0
    while i + 4 <= len(data):
        form, attribute, value = struct.unpack_from("<BBH", data, i)
        i += 4
        if form == 4:
            yield attribute, data[i : i + value]
            i += value
        else:
            yield attribute, value


class Cubin:
    """A parsed cubin: ``kernels`` by name, and the module's variables.

    data: path or bytes.  Raises SimError if it is not for sm_70.
    """

    def __init__(self, data: bytes | str | os.PathLike):
        self.data = bytes(data) if isinstance(data, bytes | bytearray) else Path(data).read_bytes()
        self._sections = _sections(self.data)
        self._by_name = {s.name: s for s in self._sections}
        self._symbols = _symbols(self._sections)
        self._layout_globals()
        parsed = disassembly.parse(disassembly.nvdisasm_text(self.data))
        self.kernels: dict[str, Kernel] = {}
        for s in self._sections:
            if s.name.startswith(".text."):
                self.kernels[s.name[6:]] = self._kernel(s, *parsed[s.name[6:]])

    def _layout_globals(self) -> None:
        """Module-scope variables are one block: .nv.global.init, then .nv.global."""
        self._global_offset: dict[int, int] = {}
        block = bytearray()
        for name in (".nv.global.init", ".nv.global"):
            for i, s in enumerate(self._sections):
                if s.name == name:
                    block += bytes(-len(block) % 256)
                    self._global_offset[i] = len(block)
                    block += s.data if s.type != _NOBITS else bytes(s.size)
        self.globals_init = bytes(block)
        self.globals_size = len(block)
        self.sym_global = {
            y.name: self._global_offset[y.section] + y.value
            for y in self._symbols
            if y.section in self._global_offset
        }

    def _kernel(self, text: _Section, instrs: list[Instr], labels: dict[str, int]) -> Kernel:
        name = text.name[6:]
        if len(instrs) * 16 != text.size:
            raise SimError(
                f"{name}: the disassembly has {len(instrs)} instructions, the section holds "
                f"{text.size // 16}"
            )
        k = Kernel(name, instrs, labels, regs=max(text.info >> 24, 4))
        if shared := self._by_name.get(f".nv.shared.{name}"):
            k.static_smem = shared.size
        params = []
        for attribute, value in self._info(f".nv.info.{name}"):
            if attribute == _PARAM_CBANK:
                _, k.param_base, k.param_size = struct.unpack_from("<IHH", value)
            elif attribute == _KPARAM_INFO:
                _, ordinal, offset, size = struct.unpack_from("<IHHI", value)
                params.append((ordinal, offset, size >> 18))
        k.params = [(offset, size) for _, offset, size in sorted(params)]
        for attribute, value in self._info(".nv.info"):
            if attribute in (_FRAME_SIZE, _MIN_STACK_SIZE, _MAX_STACK_SIZE):
                symbol, size = struct.unpack("<II", value)
                if self._symbols[symbol].name == name:
                    k.frame = max(k.frame, size)
        for bank in range(18):
            own, shared_by_all = f".nv.constant{bank}.{name}", f".nv.constant{bank}"
            if found := self._by_name.get(own) or self._by_name.get(shared_by_all):
                k.const[bank] = found.data
        return k

    def _info(self, section: str):
        found = self._by_name.get(section)
        return _attributes(found.data) if found else ()

    def const_bank(self, kernel: Kernel, bank: int, globals_at: int) -> bytes:
        """Bytes of a constant bank; addresses of module variables are relocated to globals_at."""
        out = bytearray(kernel.const.get(bank, b""))
        for name in (f".nv.constant{bank}.{kernel.name}", f".nv.constant{bank}"):
            for prefix, entry in ((".rel", 16), (".rela", 24)):
                section = self._by_name.get(prefix + name)
                for i in range(section.size // entry if section else 0):
                    offset, info = struct.unpack_from("<QQ", section.data, i * entry)
                    symbol = self._symbols[info >> 32]
                    if symbol.section not in self._global_offset:
                        continue
                    if info & 0xFFFFFFFF != 2:  # a 64-bit absolute address
                        raise SimError(
                            f"{kernel.name}: relocation type {info & 0xFFFFFFFF} in constant "
                            f"bank {bank}"
                        )
                    at = out if entry == 16 else section.data
                    addend = struct.unpack_from("<q", at, offset if entry == 16 else i * 24 + 16)[0]
                    address = self._global_offset[symbol.section] + symbol.value + addend
                    struct.pack_into("<Q", out, offset, globals_at + address)
        return bytes(out)
