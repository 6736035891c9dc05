"""Local repositories: what is listed, what changes a fingerprint, and that no link leads out."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.repository.storage import LocalModel, Repository


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "add_sub" / "1").mkdir(parents=True)
    (folder / "add_sub" / "config.pbtxt").write_text('backend: "python"')
    (folder / "add_sub" / "1" / "model.py").write_text("pass")
    return folder


def test_models_are_the_folders(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in (".git", "zeta", "no model", "mo\ndel"):
        (root / name).mkdir()
    (root / "README.md").write_text("no model")
    repository = Repository(str(root))
    with caplog.at_level(logging.WARNING):
        assert repository.model_names() == repository.model_names() == ["add_sub", "zeta"]
    left_out = [message for message in caplog.messages if "left out" in message]
    assert len(left_out) == 2, "each is told once"
    assert all(message.isprintable() for message in left_out)


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_fetching_gives_the_folder_itself(root: Path, prefix: str) -> None:
    model = Repository(prefix + str(root)).fetch("add_sub")
    assert model.folder == root / "add_sub"
    model.close()
    model.close()
    assert (root / "add_sub" / "config.pbtxt").exists()


@pytest.mark.parametrize("name", ["nothing", "...", "..my_model", ".git"])
def test_unknown_models(root: Path, name: str) -> None:
    (root / ".git").mkdir()
    repository = Repository(str(root))
    for call in (repository.fetch, repository.fingerprint):
        with pytest.raises(ModelNotFoundError):
            call(name)


@pytest.mark.parametrize("name", ["../repository/add_sub", "..", "", "add_sub/1", "/etc"])
def test_bad_names(root: Path, name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Repository(str(root)).fetch(name)
    assert not isinstance(caught.value, ModelNotFoundError)


def changed(path: Path) -> None:
    path.write_text(path.read_text() + "# more")


def touched(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def swapped(path: Path) -> None:
    """Another file of the same size and times, as an atomic replacement leaves it."""
    info, other = path.stat(), path.with_suffix(".new")
    other.write_bytes(b"x" * info.st_size)
    os.utime(other, ns=(info.st_atime_ns, info.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [changed, touched, swapped, Path.unlink])
def test_a_changed_file_changes_the_fingerprint(root: Path, change) -> None:
    repository = Repository(str(root))
    before = repository.fingerprint("add_sub")
    assert repository.fingerprint("add_sub") == before
    change(root / "add_sub" / "1" / "model.py")
    assert repository.fingerprint("add_sub") != before


def test_a_new_file_changes_it_and_running_a_model_does_not(root: Path) -> None:
    repository = Repository(str(root))
    before = repository.fingerprint("add_sub")
    (root / "add_sub" / "1" / "__pycache__").mkdir()
    (root / "add_sub" / "1" / "__pycache__" / "model.pyc").write_text("")
    assert repository.fingerprint("add_sub") == before
    (root / "add_sub" / "2").mkdir()
    (root / "add_sub" / "2" / "model.py").write_text("")
    assert repository.fingerprint("add_sub") != before


@pytest.mark.parametrize("link", ["add_sub/1/weights", "add_sub/2", "add_sub/deep/er/x"])
@pytest.mark.parametrize("target", ["outside", "outside/secret.txt"])
def test_a_link_out_of_the_repository_is_refused(root: Path, link: str, target: str) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(root.parent / target)
    repository = Repository(str(root))
    for call in (repository.fetch, repository.fingerprint):
        with pytest.raises(InvalidRequestError, match="is a link that leads out of the model repository") as caught:
            call("add_sub")
        assert str(root.parent) not in caught.value.message


def test_a_model_that_is_itself_a_link_out_is_refused(root: Path) -> None:
    (root.parent / "elsewhere" / "1").mkdir(parents=True)
    (root / "linked").symlink_to(root.parent / "elsewhere")
    with pytest.raises(InvalidRequestError, match="leads out of the model repository"):
        Repository(str(root)).fetch("linked")


def test_a_neighbour_whose_name_begins_alike_is_outside(root: Path) -> None:
    (root.parent / "repository-2").mkdir()
    (root / "add_sub" / "2").symlink_to(root.parent / "repository-2")
    with pytest.raises(InvalidRequestError, match="leads out of the model repository"):
        Repository(str(root)).fetch("add_sub")


def test_links_inside_the_repository_are_followed_also_in_circles(root: Path) -> None:
    (root / "shared").mkdir()
    (root / "shared" / "weights").write_text("1")
    (root / "add_sub" / "1" / "weights").symlink_to(root / "shared" / "weights")
    (root / "add_sub" / "2").symlink_to("1")
    (root / "add_sub" / "1" / "up").symlink_to("..")
    (root / "add_sub" / "broken").symlink_to("nothing")
    repository = Repository(str(root))
    before = repository.fingerprint("add_sub")
    assert repository.fetch("add_sub").folder.is_dir()
    changed(root / "shared" / "weights")
    assert repository.fingerprint("add_sub") != before


def test_the_repository_may_itself_be_reached_through_a_link(root: Path) -> None:
    (root.parent / "current").symlink_to(root)
    repository = Repository(str(root.parent / "current"))
    assert repository.model_names() == ["add_sub"]
    assert repository.fetch("add_sub").folder.is_dir()


def test_a_repository_that_is_not_there(root: Path) -> None:
    for path in (root / "nothing", root / "add_sub" / "config.pbtxt"):
        with pytest.raises(ConfigError):
            Repository(str(path))
    repository = Repository(str(root))
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    root.rmdir()
    with pytest.raises(EngineError, match="cannot be read"):
        repository.model_names()


def test_a_repository_that_anybody_can_write_to_is_warned_of(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    root.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        Repository(str(root))
    assert "can be changed by all users" in caplog.text


def test_closing_removes_once(tmp_path: Path) -> None:
    removed: list[int] = []
    model = LocalModel(tmp_path, lambda: removed.append(1))
    model.close()
    model.close()
    assert removed == [1]
