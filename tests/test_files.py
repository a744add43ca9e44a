"""Files and folders that are written completely or not at all, and locks between processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import buttress as bt
from buttress.files import cache_folder, leaves, locked, make_folder, new_folder, remove, replacing, write_text


class TestReplacing:
    def test_a_file_appears_or_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "deep" / "below" / "file.json"
        for text in ("first", "second"):
            with replacing(path) as part:
                part.write_text(text)
                assert part.parent == path.parent, "on the same disk"
            assert path.read_text() == text
        assert [p.name for p in path.parent.iterdir()] == ["file.json"]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_leaves_nothing(self, tmp_path: Path, error: type[BaseException]) -> None:
        path = tmp_path / "file.json"
        path.write_text("before")

        def interrupted() -> None:
            with replacing(path) as part:
                part.write_text("half of it")
                raise error

        with pytest.raises(error):
            interrupted()
        assert path.read_text() == "before"
        assert [p.name for p in tmp_path.iterdir()] == ["file.json"]

    def test_an_error_before_anything_is_written(self, tmp_path: Path) -> None:
        with pytest.raises(RuntimeError), replacing(tmp_path / "file.json"):
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []

    def test_a_block_that_writes_nothing_is_an_error(self, tmp_path: Path) -> None:
        path = tmp_path / "file.json"
        path.write_text("before")
        with pytest.raises(FileNotFoundError), replacing(path):
            pass
        assert path.read_text() == "before"

    def test_no_search_finds_half_a_file(self, tmp_path: Path) -> None:
        with replacing(tmp_path / "runs.jsonl") as part:
            part.write_text("half of it")
            assert list(tmp_path.glob("*.jsonl")) == []

    def test_two_writers_do_not_meet(self, tmp_path: Path) -> None:
        path = tmp_path / "file.json"
        with replacing(path) as one, replacing(path) as other:
            one.write_text("one")
            other.write_text("other")
            assert one != other
        assert path.read_text() == "one", "the outer block ends last"

    def test_text(self, tmp_path: Path) -> None:
        write_text(tmp_path / "file.txt", "grüße\n")
        assert (tmp_path / "file.txt").read_bytes() == "grüße\n".encode()

    def test_files_that_cannot_be_written_to_are_flushed(self, tmp_path: Path) -> None:
        """Flushing opens for reading alone: a file without write permission must not fail."""
        path = tmp_path / "file.txt"
        with replacing(path) as part:
            part.write_text("content")
            part.chmod(0o444)
        assert path.read_text() == "content"
        path.chmod(0o644)


class TestDurability:
    def test_files_and_folders_are_flushed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flushed: list[tuple[int, int]] = []
        monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(identity(os.fstat(descriptor))))
        with new_folder(tmp_path / "model") as part:
            (part / "inside").mkdir()
            (part / "inside" / "file").touch()
        with replacing(tmp_path / "file") as part:
            part.touch()
        for path in (
            tmp_path,
            tmp_path / "model",
            tmp_path / "model" / "inside",
            tmp_path / "model" / "inside" / "file",
        ):
            assert identity(path.stat()) in flushed
        assert identity((tmp_path / "file").stat()) in flushed

    def test_folders_that_cannot_be_flushed_do_no_harm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def reject(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError("folders cannot be flushed")

        monkeypatch.setattr(os, "fsync", reject)
        write_text(tmp_path / "file", "content")
        with new_folder(tmp_path / "model") as part:
            (part / "file").touch()
        assert (tmp_path / "file").read_text() == "content"
        assert (tmp_path / "model" / "file").exists()

    def test_a_file_that_cannot_be_flushed_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def reject(descriptor: int) -> None:
            raise OSError("the disk is full")

        monkeypatch.setattr(os, "fsync", reject)
        with pytest.raises(OSError, match="disk is full"):
            write_text(tmp_path / "file", "content")
        assert list(tmp_path.iterdir()) == []


def identity(status: os.stat_result) -> tuple[int, int]:
    """Of a file or folder, whatever its name."""
    return status.st_dev, status.st_ino


class TestNewFolder:
    def test_a_folder_appears_at_the_end(self, tmp_path: Path) -> None:
        target = tmp_path / "deep" / "model"
        with new_folder(target) as part:
            (part / "inside").mkdir()
            (part / "inside" / "file").write_text("content")
            assert not target.exists()
        assert (target / "inside" / "file").read_text() == "content"
        assert target.stat().st_mode & 0o777 == 0o755
        assert [p.name for p in target.parent.iterdir()] == ["model"]

    def test_an_empty_folder_is_taken(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        with new_folder(str(tmp_path / "model")) as part:
            (part / "file").touch()
        assert [p.name for p in (tmp_path / "model").iterdir()] == ["file"]

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_what_exists_is_rejected(self, tmp_path: Path, kind: str) -> None:
        target = tmp_path / "model"
        content = target
        if kind == "folder":
            target.mkdir()
            content = target / "mine"
        content.write_text("precious")
        with pytest.raises(bt.PlanError, match="exists already: choose another folder"), new_folder(target):
            raise AssertionError("nothing may be done")
        assert content.read_text() == "precious"
        assert [p.name for p in tmp_path.iterdir()] == ["model"]

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
    def test_an_error_leaves_nothing(self, tmp_path: Path, error: type[BaseException]) -> None:
        def interrupted() -> None:
            with new_folder(tmp_path / "model") as part:
                (part / "file").touch()
                raise error

        with pytest.raises(error):
            interrupted()
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_another_process_has_filled(self, tmp_path: Path) -> None:
        target = tmp_path / "model"

        def late() -> None:
            with new_folder(target) as part:
                (part / "file").touch()
                target.mkdir()
                (target / "theirs").write_text("first")

        with pytest.raises(OSError, match="not empty"):
            late()
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
        assert (target / "theirs").read_text() == "first"

    def test_read_only_content_is_flushed(self, tmp_path: Path) -> None:
        with new_folder(tmp_path / "model") as part:
            (part / "inside").mkdir()
            (part / "inside" / "file").write_text("content")
            (part / "inside" / "file").chmod(0o444)
            (part / "inside").chmod(0o555)
        assert (tmp_path / "model" / "inside" / "file").read_text() == "content"
        (tmp_path / "model" / "inside").chmod(0o755)


HOLDER = """
import sys
from pathlib import Path
from buttress.files import locked
with locked(Path(sys.argv[1]), wait=True) as granted:
    print(granted, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(os.name == "nt", reason="there are no such locks")
class TestLocked:
    def test_another_process_holds_it(self, tmp_path: Path) -> None:
        path = tmp_path / "below" / "lock"
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "True\n"
            with locked(path, wait=False) as granted:
                assert not granted
            holder.communicate("", timeout=60)
        finally:
            holder.kill()
            holder.wait()
        with locked(path, wait=False) as granted:
            assert granted, "it ends with the process"

    def test_it_ends_with_the_block(self, tmp_path: Path) -> None:
        for _ in range(2):
            with locked(tmp_path / "lock", wait=False) as granted:
                assert granted
        with pytest.raises(RuntimeError), locked(tmp_path / "lock", wait=True):
            raise RuntimeError
        with locked(tmp_path / "lock", wait=False) as granted:
            assert granted
            with locked(tmp_path / "lock", wait=False) as again:
                assert not again, "one holder at a time, in one process too"


class TestLinks:
    def test_removing_does_not_follow_links(self, tmp_path: Path) -> None:
        precious, folder = tmp_path / "precious", tmp_path / "folder"
        precious.mkdir()
        (precious / "file").touch()
        folder.mkdir()
        (folder / "inside").symlink_to(precious)
        (tmp_path / "link").symlink_to(precious)
        for path in (folder, tmp_path / "link", tmp_path / "absent"):
            remove(path)
            assert not path.exists()
            assert not path.is_symlink()
        assert (precious / "file").exists()

    def test_which_paths_leave_a_folder(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "file").touch()
        (folder / "inner").symlink_to("file")
        (folder / "outer").symlink_to("../elsewhere")
        (folder / "loop").symlink_to("loop")
        (tmp_path / "linked").symlink_to(folder)
        assert not leaves(folder, folder / "file")
        assert not leaves(folder, folder / "inner")
        assert not leaves(folder, folder / "absent")
        assert leaves(folder, folder / "outer")
        assert not leaves(tmp_path / "linked", tmp_path / "linked" / "file")
        assert isinstance(leaves(folder, folder / "loop"), bool)

    def test_a_lock_file_that_is_a_link_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "precious").write_text("content")
        (tmp_path / "lock").symlink_to(tmp_path / "precious")
        with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock", wait=False):
            pass
        assert (tmp_path / "precious").read_text() == "content"


def test_a_lock_on_a_file_that_was_removed_counts_for_nothing(tmp_path: Path) -> None:
    """Another process may open the file before it is removed, and lock it after."""
    pytest.importorskip("fcntl", reason="this system has no such locks")
    import fcntl

    path, flock = tmp_path / "lock", fcntl.flock
    removed: list[int] = []

    def remove_meanwhile(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not removed:
            removed.append(descriptor)
            path.unlink()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", remove_meanwhile)
        with locked(path, wait=False) as granted:
            assert granted
            assert path.exists()
            with locked(path, wait=False) as again:
                assert not again


def test_new_folders_are_flushed_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(identity(os.fstat(descriptor))))
    make_folder(tmp_path / "a" / "b")
    assert flushed == [identity((tmp_path / "a").stat()), identity(tmp_path.stat())]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BUTTRESS_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("BUTTRESS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "buttress"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "buttress"
