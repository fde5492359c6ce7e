"""Shortest expressions for the 256 truth tables of LOP3."""

from __future__ import annotations

import functools


@functools.cache
def _expressions() -> dict[int, str]:
    """Truth table -> expression over {a}, {b}, {c}, found by growing number of operations."""
    best = {0xF0: "{a}", 0xCC: "{b}", 0xAA: "{c}", 0x00: "splat(0)", 0xFF: "splat(~0u)"}
    by_cost = [list(best)]
    while len(best) < 256:
        new: dict[int, str] = {}
        cost = len(by_cost)
        for x in by_cost[cost - 1]:
            new.setdefault(~x & 0xFF, f"(~{best[x]})")
        for left in range(cost):
            for x in by_cost[left]:
                for y in by_cost[cost - 1 - left]:
                    for value, sign in ((x & y, "&"), (x | y, "|"), (x ^ y, "^")):
                        new.setdefault(value, f"({best[x]}{sign}{best[y]})")
        by_cost.append([v for v in new if v not in best])
        best.update((v, new[v]) for v in by_cost[-1])
    return best


def expression(table: int, a: str, b: str, c: str) -> str:
    """C++ for LOP3 with this truth table; the operands are evaluated as often as they occur."""
    return _expressions()[table].format(a=a, b=b, c=c)
