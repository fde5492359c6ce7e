"""``python -m v100_serving check|plan|launch|bundle|doctor``: the profiles from the command line.

Exit status: 0 fine, 1 a profile is refused (the reason is on stderr), 2 wrong usage.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from v100_serving.bundle import BundleError, bundle
from v100_serving.doctor import diagnose, read_library
from v100_serving.launch import LaunchError, launch_plan
from v100_serving.memory import CARDS_GIB, ImpossibleProfile, plan_memory
from v100_serving.model_config import ConfigError, read_config
from v100_serving.profiles import Profile, ProfileError, load_profile


def _card(text: str) -> float:
    if text in CARDS_GIB:
        return CARDS_GIB[text]
    try:
        gib = float(text)
    except ValueError:
        gib = math.nan
    if not (math.isfinite(gib) and gib > 0):
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of GiB above 0 nor one of {', '.join(CARDS_GIB)}"
        )
    return gib


def _gpus(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _profile_path(text: str) -> Path:
    """A profile by path, or by name in deploy/profiles."""
    path = Path(text)
    if path.suffix in (".yaml", ".yml") or path.exists():
        return path
    return Path(__file__).resolve().parents[1] / "profiles" / f"{text}.yaml"


def _doctor(options: argparse.Namespace) -> int:
    """Prints the diagnosis; 1 where the model cannot work."""
    found = diagnose(
        read_config(options.config),
        load_profile(options.profile),
        options.card or tuple(CARDS_GIB),
        read_library(options.library) if options.library else None,
    )
    print(json.dumps(found.as_dict(), indent=2) if options.json else found.text())
    return 1 if found.problems else 0


def _describe(profile: Profile, card_gib: float | None) -> str:
    plan = plan_memory(profile, card_gib)
    pages = plan.pages
    lines = [f"{profile.name}: {profile.ranks} rank(s), KV {profile.engine.kv_cache_dtype}"]
    if profile.hardware.accelerator == "v100":
        smallest = " (the profile's min_card_gib; --card names another)"
        lines.append(f"  card           {plan.card_gib:.2f} GiB{'' if card_gib else smallest}")
    lines += [
        f"  page           {pages.block_tokens} tokens, {pages.page_bytes} bytes "
        f"(GDN state {pages.state_bytes})",
        f"  block          {pages.layers_per_group} pages = {pages.block_bytes} bytes; "
        f"{pages.attention_groups} attention + {pages.state_groups} GDN group(s)",
        f"  memory a rank  weights {plan.weights_gib:.2f} + other {plan.other_gib:.2f} + KV "
        f"{plan.kv_gib:.2f} GiB; {plan.outside_gib:.2f} GiB outside the limit",
        f"  KV cache       {plan.blocks} blocks, {plan.full_contexts:.2f} contexts of "
        f"{profile.engine.max_model_len} tokens",
    ]
    lines += [
        f"  demand         {requests} x {tokens} tokens: {needed} of {plan.blocks} blocks"
        for requests, tokens, needed in plan.demands
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs one command; see the module's text."""
    parser = argparse.ArgumentParser(prog="v100_serving", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="check profiles and print what they need")
    check.add_argument("profiles", nargs="+", type=Path)
    check.add_argument("--card", type=_card, help="GiB, or " + ", ".join(CARDS_GIB))
    plan = commands.add_parser("plan", help="the memory plan of one profile as JSON")
    plan.add_argument("profile", type=Path)
    plan.add_argument("--card", type=_card)
    launch = commands.add_parser("launch", help="launch.json of one instance")
    launch.add_argument("profile", type=Path)
    launch.add_argument("--gpus", type=_gpus, default=[], help="GPU set, such as 0,1,2,3")
    launch.add_argument("--port", type=int, required=True)
    doctor = commands.add_parser(
        "doctor", help="what a model's config.json will do on V100 under a profile"
    )
    doctor.add_argument("--config", type=Path, required=True, help="config.json, or its folder")
    doctor.add_argument("--profile", type=_profile_path, required=True, help="a path, or a name")
    doctor.add_argument("--card", type=_card, action="append", help="GiB, or a card's name")
    doctor.add_argument("--library", type=Path, help="_vllm_fa2_C.abi3.so to ask what it holds")
    doctor.add_argument("--json", action="store_true")
    pack = commands.add_parser(
        "bundle", help="one release of one instance; its rendered files come as JSON on stdin"
    )
    pack.add_argument("profile", type=Path)
    pack.add_argument("--gpus", type=_gpus, default=[])
    pack.add_argument("--port", type=int, required=True)
    for name in ("release", "systemd", "out"):
        pack.add_argument(f"--{name}", type=Path, required=True)
    pack.add_argument("--wheelhouse", type=Path)
    options = parser.parse_args(argv)
    try:
        if options.command == "check":
            for path in options.profiles:
                print(_describe(load_profile(path), options.card))
        elif options.command == "doctor":
            return _doctor(options)
        elif options.command == "plan":
            print(json.dumps(plan_memory(load_profile(options.profile), options.card).as_dict()))
        elif options.command == "bundle":
            facts = bundle(
                release=options.release,
                profile_path=options.profile,
                gpus=options.gpus,
                port=options.port,
                systemd=options.systemd,
                rendered=json.load(sys.stdin),
                out=options.out,
                wheelhouse=options.wheelhouse,
            )
            print(json.dumps(facts))
        else:
            print(
                json.dumps(launch_plan(load_profile(options.profile), options.gpus, options.port))
            )
    except (ProfileError, ImpossibleProfile, LaunchError, ConfigError, BundleError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
