"""The patch tool on a small made-up wheel: exact application, errors that help, refresh."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner
from v100_patches import AppliedPatch, HunkError, PatchToolError, apply_series, cli
from v100_patches.cli import app, main
from v100_patches.series import load

STOCK = {
    "vllm/one.py": "".join(f"line {n}\n" for n in range(1, 31)),
    "vllm/old.py": "goes away\n",
    "vllm/logo.png": b"\x89PNG\xff\x00",
    "vllm/_C.abi3.so": b"\x7fELF",
}
HEADER = """Subject: one: {subject}

What: a change.

Why: a reason.

Tests: tests/test_one.py

Upstream: not submitted: made up.
---
"""
FIRST = """diff --git a/vllm/one.py b/vllm/one.py
--- a/vllm/one.py
+++ b/vllm/one.py
@@ -3,7 +3,7 @@ line 2
 line 3
 line 4
 line 5
-line 6
+line six
 line 7
 line 8
 line 9
"""
SECOND = """diff --git a/vllm/new.py b/vllm/new.py
new file mode 100644
--- /dev/null
+++ b/vllm/new.py
@@ -0,0 +1,2 @@
+fresh
+no newline
\\ No newline at end of file
diff --git a/vllm/old.py b/vllm/old.py
deleted file mode 100644
--- a/vllm/old.py
+++ /dev/null
@@ -1 +0,0 @@
-goes away
diff --git a/vllm/one.py b/vllm/one.py
--- a/vllm/one.py
+++ b/vllm/one.py
@@ -18,6 +18,7 @@ line 17
 line 18
 line 19
 line 20
+line 20 and a half
 line 21
 line 22
 line 23
"""
CPU_ONLY = """diff --git a/vllm/one.py b/vllm/one.py
--- a/vllm/one.py
+++ b/vllm/one.py
@@ -29,3 +29,4 @@ line 27
 line 28
 line 29
 line 30
+only on a CPU
"""


class World:
    """A repository with a series, a wheel cache and an unpacked tree, all made up."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.series = root / "patches" / "v1"
        self.wheels = root / "wheels"
        for folder in (self.series, self.wheels, root / "tests"):
            folder.mkdir(parents=True)
        (root / "tests" / "test_one.py").touch()
        self.pin(STOCK)
        self.patch("0001-first.patch", FIRST)
        self.patch("0002-second.patch", SECOND)
        self.patch("0900-cpu.patch", CPU_ONLY)
        self.list("core 0001-first.patch", "core 0002-second.patch", "cpu 0900-cpu.patch")

    def pin(self, files: dict[str, str | bytes]) -> None:
        pins = ['version = "1.0"']
        for flavour in ("cuda", "cpu"):
            wheel = self.wheels / f"{flavour}.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                for name, content in files.items():
                    archive.writestr(name, content)
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            pins.append(
                f'[wheel.{flavour}]\ndistribution = "vllm"\n'
                f'file = "{wheel.name}"\nsha256 = "{digest}"'
            )
        (self.series / "base.toml").write_text("\n".join(pins))

    def patch(self, name: str, diff: str) -> Path:
        path = self.series / name
        path.write_text(HEADER.format(subject=name) + diff)
        return path

    def list(self, *rows: str) -> None:
        (self.series / "series").write_text("# a comment\n" + "\n".join(rows) + "\n")

    def tree(self, name: str = "tree") -> Path:
        root = self.root / name
        for path, content in STOCK.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    def run(self, *arguments: str):
        options = ["--series-dir", str(self.series), "--wheel-dir", str(self.wheels)]
        if arguments[0] in ("new", "list"):
            options = options[:2]
        return CliRunner().invoke(app, [*arguments, *options])


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_applies_the_series_of_a_flavour(world: World) -> None:
    tree = world.tree()
    applied = apply_series(tree, "cpu", world.series)
    assert [patch.name for patch in applied] == [
        "0001-first.patch",
        "0002-second.patch",
        "0900-cpu.patch",
    ]
    data = (world.series / "0002-second.patch").read_bytes()
    assert applied[1] == AppliedPatch(
        "0002-second.patch",
        hashlib.sha256(data).hexdigest(),
        ("vllm/new.py", "vllm/old.py", "vllm/one.py"),
    )
    lines = (tree / "vllm/one.py").read_text().splitlines()
    assert lines[5] == "line six"
    assert lines[20] == "line 20 and a half"
    assert lines[-1] == "only on a CPU"
    assert (tree / "vllm/new.py").read_bytes() == b"fresh\nno newline"
    assert not (tree / "vllm/old.py").exists()


def test_a_v100_wheel_carries_no_cpu_patch(world: World) -> None:
    tree = world.tree()
    names = [patch.name for patch in apply_series(tree, "cuda", world.series)]
    assert names == ["0001-first.patch", "0002-second.patch"]
    assert "only on a CPU" not in (tree / "vllm/one.py").read_text()


def test_does_not_write_through_hard_links(world: World) -> None:
    tree, other = world.tree(), world.root / "linked"
    (other / "vllm").mkdir(parents=True)
    for file in (tree / "vllm").iterdir():
        (other / "vllm" / file.name).hardlink_to(file)
    apply_series(other, "cuda", world.series)
    assert (tree / "vllm/one.py").read_text() == STOCK["vllm/one.py"]


def test_one_edited_context_line_is_refused_with_all_that_is_needed(world: World) -> None:
    patch = world.series / "0002-second.patch"
    patch.write_text(patch.read_text().replace(" line 22\n", " line twenty-two\n"))
    tree = world.tree()
    with pytest.raises(HunkError) as caught:
        apply_series(tree, "cuda", world.series)
    error = caught.value
    assert (error.patch, error.file, error.hunk) == ("0002-second.patch", "vllm/one.py", 1)
    assert error.line == 18
    text = str(error)
    assert "22  expected  | line twenty-two" in text
    assert "22  found     | line 22" in text
    assert "18            | line 18" in text
    assert "what to do:" in text
    # All or nothing: the patch before it is not in the tree either.
    assert (tree / "vllm/one.py").read_text() == STOCK["vllm/one.py"]
    assert not (tree / "vllm/new.py").exists()


def test_a_hunk_at_another_line_is_refused_and_located(world: World) -> None:
    tree = world.tree()
    one = tree / "vllm/one.py"
    one.write_text("inserted\n" + one.read_text())
    with pytest.raises(HunkError, match="at line 4 instead of 3"):
        apply_series(tree, "cuda", world.series)


def test_a_patched_tree_is_refused(world: World) -> None:
    tree = world.tree()
    apply_series(tree, "cuda", world.series, through="0001")
    with pytest.raises(PatchToolError, match="already in the file"):
        apply_series(tree, "cuda", world.series)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda s: s.replace("@@ -3,7 +3,7 @@", "@@ -3,7 +4,7 @@"), "contradict each other"),
        (lambda s: s.replace("@@ -3,7 +3,7 @@", "@@ -3,8 +3,7 @@"), "well-formed"),
        (lambda s: s.replace("vllm/one.py", "setup.py"), "outside vllm/"),
        (lambda s: s.replace("\n---\ndiff", "\ndiff"), "no line '---'"),
        (lambda s: s.replace("vllm/one.py", "vllm/none.py"), "no such file"),
    ],
)
def test_damaged_patches_are_refused(world: World, damage, says: str) -> None:
    patch = world.series / "0001-first.patch"
    patch.write_text(damage(patch.read_text()))
    with pytest.raises(PatchToolError, match=says) as caught:
        apply_series(world.tree(), "cuda", world.series)
    assert "0001-first.patch" in str(caught.value)


def test_unknown_flavour_and_missing_tree(world: World) -> None:
    with pytest.raises(PatchToolError, match="cuda, cpu"):
        apply_series(world.tree(), "rocm", world.series)
    with pytest.raises(PatchToolError, match="no folder vllm/"):
        apply_series(world.root / "nowhere", "cuda", world.series)


def test_verify_accepts_a_refreshed_series(world: World) -> None:
    assert world.run("refresh").exit_code == 0
    result = world.run("verify")
    assert result.exit_code == 0, result.exception
    assert "cuda: 2 patches apply exactly" in result.output
    assert "cpu: 3 patches apply exactly" in result.output


def verify_problems(world: World) -> str:
    result = world.run("verify")
    assert isinstance(result.exception, PatchToolError)
    return str(result.exception)


@pytest.mark.parametrize("field", ["Subject", "What", "Why", "Tests", "Upstream"])
def test_verify_wants_every_header_field(world: World, field: str) -> None:
    world.run("refresh")
    patch = world.series / "0001-first.patch"
    lines = [line for line in patch.read_text().split("\n") if not line.startswith(f"{field}:")]
    patch.write_text("\n".join(lines))
    assert f"0001-first.patch: the header says nothing under '{field}:'" in verify_problems(world)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("not submitted: made up.", "maybe", "has neither a number"),
        ("tests/test_one.py", "tests/test_two.py", "tests/test_two.py, which is not"),
        ("tests/test_one.py", "by hand", "names no file"),
        ("line six", "line  six", "SHA-256 is"),
    ],
)
def test_verify_names_what_is_wrong(world: World, old: str, new: str, says: str) -> None:
    world.run("refresh")
    patch = world.series / "0001-first.patch"
    patch.write_text(patch.read_text().replace(old, new))
    problems = verify_problems(world)
    assert "0001-first.patch" in problems and says in problems


def test_verify_sees_that_series_and_folder_disagree(world: World) -> None:
    world.run("refresh")
    world.patch("0003-stray.patch", FIRST)
    assert "holds 0003-stray.patch, but series does not list it" in verify_problems(world)
    (world.series / "0003-stray.patch").unlink()
    (world.series / "0001-first.patch").unlink()
    assert "series lists 0001-first.patch, but" in verify_problems(world)


def test_verify_wants_groups_and_numbers_in_order(world: World) -> None:
    world.list("cpu 0900-cpu.patch", "core 0001-first.patch", "core 0002-second.patch")
    problems = verify_problems(world)
    assert "order by number" in problems and "order of groups" in problems


def test_verify_refuses_another_wheel(world: World) -> None:
    world.run("refresh")
    wheel = world.wheels / "cuda.whl"
    wheel.write_bytes(wheel.read_bytes() + b"x")
    assert "but base.toml pins" in verify_problems(world)
    wheel.unlink()
    assert "is not there" in verify_problems(world)


def test_a_series_line_that_is_none(world: World) -> None:
    world.list("core 0001-first.patch", "0002-second.patch")
    with pytest.raises(PatchToolError, match=r"line 3: '0002-second\.patch'"):
        load(world.series)


def test_new_apply_edit_refresh(world: World) -> None:
    """The whole way of docs/patches.md."""
    world.run("refresh")
    assert world.run("new", "0003-third.patch", "--group", "core").exit_code == 0
    rows = (world.series / "series").read_text().splitlines()
    assert rows[3:5] == ["core  0003-third.patch", "cpu 0900-cpu.patch"]
    assert "0003-third.patch: has no diff" in verify_problems(world)

    tree = world.root / "work"
    result = world.run("apply", str(tree), "--flavour", "cuda", "--unpack", "--through", "0003")
    assert result.exit_code == 0, result.exception
    one = tree / "vllm/one.py"
    one.write_text(one.read_text().replace("line 12\n", "line 12\nline twelve\n"))
    patch = world.series / "0003-third.patch"
    patch.write_text(HEADER.format(subject="third"))
    result = world.run("refresh", "0003", "--tree", str(tree))
    assert result.exit_code == 0, result.exception
    assert "+line twelve\n" in patch.read_text()
    assert "index " not in patch.read_text()
    # The CPU patch behind it moved down by the new line, and nothing else of it changed.
    assert "moved hunks of 0900-cpu.patch" in result.output
    assert "@@ -30,3 +30,4 @@" in (world.series / "0900-cpu.patch").read_text()
    assert world.run("verify").exit_code == 0
    # Another refresh finds nothing to do.
    assert world.run("refresh").output == ""


def test_refresh_keeps_the_header_and_regenerates_the_same_bytes(world: World) -> None:
    world.run("refresh")
    tree = world.root / "work"
    world.run("apply", str(tree), "--flavour", "cpu", "--unpack", "--through", "0002")
    world.run("refresh", "0002", "--tree", str(tree))
    before = (world.series / "0002-second.patch").read_bytes()
    assert before.startswith(HEADER.format(subject="0002-second.patch").encode())
    result = world.run("refresh", "0002", "--tree", str(tree))
    assert result.exit_code == 0 and result.output == ""
    assert (world.series / "0002-second.patch").read_bytes() == before


def test_refresh_refuses_a_tree_with_later_patches(world: World) -> None:
    tree = world.root / "work"
    world.run("apply", str(tree), "--flavour", "cuda", "--unpack")
    result = world.run("refresh", "0001", "--tree", str(tree))
    assert "holds 0002-second.patch, which comes after" in str(result.exception)


def test_refresh_does_not_guess_between_two_places(world: World) -> None:
    patch = world.series / "0001-first.patch"
    same = "".join(f" same {n}\n" for n in (1, 2, 3))
    patch.write_text(
        HEADER.format(subject="first")
        + "--- a/vllm/old.py\n+++ b/vllm/old.py\n@@ -9,3 +9,4 @@\n"
        + same
        + "+added\n"
    )
    world.pin({"vllm/old.py": "same 1\nsame 2\nsame 3\n" * 2})
    world.list("core 0001-first.patch")
    result = world.run("refresh")
    assert isinstance(result.exception, HunkError)
    assert "at line 1, 4 instead of 9" in str(result.exception)


def test_new_refuses_a_taken_number_and_a_bad_name(world: World) -> None:
    assert "is taken" in str(world.run("new", "0001-other.patch").exception)
    assert "not a patch file name" in str(world.run("new", "0004_other.patch").exception)


def test_list_shows_group_and_upstream(world: World) -> None:
    result = world.run("list")
    assert result.exit_code == 0
    assert "core" in result.output and "cpu" in result.output


def test_list_never_cuts_the_names_that_other_commands_take(world: World, monkeypatch) -> None:
    name = "0003-a-name-that-is-longer-than-what-a-narrow-terminal-leaves-for-it.patch"
    assert world.run("new", name).exit_code == 0
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli, "out", Console(highlight=False, soft_wrap=True))
    assert name in world.run("list").output


@pytest.mark.parametrize(
    ("number", "group"), [("0950", "core"), ("0042", "cuda"), ("0899", "cpu"), ("0000", "core")]
)
def test_new_keeps_to_the_numbers_of_the_group(world: World, number: str, group: str) -> None:
    before = (world.series / "series").read_text()
    result = world.run("new", f"{number}-x.patch", "--group", group)
    assert f"number {number} is not one of group {group}" in str(result.exception)
    assert (world.series / "series").read_text() == before


@pytest.mark.parametrize("command", [["verify"], ["apply", "t", "--unpack"]])
def test_an_unknown_flavour_is_named(world: World, command: list[str]) -> None:
    world.run("refresh")
    result = world.run(*command, "--flavour", "rocm")
    assert "unknown flavour 'rocm'" in str(result.exception)


def test_errors_go_to_stderr_with_exit_status_1(world: World, capsys, monkeypatch) -> None:
    monkeypatch.setattr(
        "sys.argv", ["v100_patches", "apply", "nowhere", "--series-dir", str(world.series)]
    )
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    shown = capsys.readouterr()
    assert "error: nowhere has no folder vllm/" in shown.err
    assert "what to do:" in shown.err and not shown.out
