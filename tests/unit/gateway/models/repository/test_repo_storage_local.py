"""Local repositories: what is listed, what changes a fingerprint, and which links are followed."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.repository import storage_local
from penstock.gateway.models.repository.layout import ModelFileError
from penstock.gateway.models.repository.storage import LocalModel, Repository
from penstock.gateway.models.repository.storage_local import LinkRule, Links, ModelPlace, RefusedLinkError


@pytest.fixture(autouse=True)
def _no_files_for_groups() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


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


# Links


def outside(root: Path) -> Path:
    """A model beside the repository."""
    folder = root.parent / "store" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"')
    (folder / "1" / "model.py").write_text("pass")
    return folder


def refusal(root: Path, name: str = "add_sub", **options: Any) -> str:
    with pytest.raises(ModelFileError) as caught:
        Repository(str(root), **options).fetch(name)
    assert str(root.parent) not in caught.value.public
    return caught.value.message


@pytest.mark.parametrize(
    ("link", "target"),
    [
        ("linked", "store/m"),
        ("linked", "../{root}/store/../store/m"),
        ("add_sub/2", "store/m/1"),
        ("add_sub/2/model.py", "store/m/1/model.py"),
        ("add_sub/configs/a.pbtxt", "store/m/config.pbtxt"),
        ("add_sub/1/weights", "store/m"),
        ("add_sub/env/bin/python", "store/python3"),
    ],
)
@pytest.mark.parametrize("rule", ["trusted", "modelcar"])
def test_links_out_are_followed(root: Path, rule: LinkRule, link: str, target: str) -> None:
    outside(root)
    (root.parent / "store" / "python3").symlink_to("m/1/model.py")  # as those of interpreters
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(root.parent / target.format(root=root.parent.name))
    repository = Repository(str(root), rule)
    name = link.partition("/")[0]
    assert repository.fetch(name).folder == root / name
    assert name in repository.model_names()
    before = repository.fingerprint(name)
    is_config = target.endswith("config.pbtxt")
    changed(root.parent / "store" / "m" / ("config.pbtxt" if is_config else "1/model.py"))
    assert repository.fingerprint(name) != before


@pytest.mark.parametrize("link", ["add_sub/1/weights", "add_sub/2", "add_sub/deep/er/x", "linked"])
@pytest.mark.parametrize("target", ["store/m", "store/m/config.pbtxt", "repository-2", "/"])
def test_inside_refuses_each_link_out_of_the_repository(root: Path, link: str, target: str) -> None:
    outside(root)
    (root.parent / "repository-2").mkdir()
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    (root / link).symlink_to(root.parent / target)
    told = refusal(root, link.partition("/")[0], rule="inside")
    assert told.startswith(f"{link} of model ")
    assert told.endswith(" is a link that leads out of the model repository")


@dataclass(frozen=True)
class Fault:
    place: str
    mode: int
    link: str = "add_sub/2"
    target: str = "store/m/1"
    shown: str = ""
    """Of the link or file that is named, where that is not `link`."""
    is_behind: bool = False


FAULTS = {
    "a file of all users": Fault("store/m/1/model.py", 0o646, "add_sub/1/more.py", "store/m/1/model.py"),
    "a file of a group": Fault("store/m/1/model.py", 0o664, "add_sub/1/more.py", "store/m/1/model.py"),
    "a configuration": Fault("store/m/config.pbtxt", 0o666, "add_sub/configs/x.pbtxt", "store/m/config.pbtxt"),
    "a folder of all users": Fault("store/m/1", 0o777),
    "a folder of a group": Fault("store/m/1", 0o775),
    "the folder above": Fault("store/m", 0o775),
    "a folder far above": Fault("store", 0o777),
    "the folder above the repository, too": Fault(".", 0o770),
    "a file in a linked folder": Fault("store/m/1/model.py", 0o666, shown="add_sub/2/model.py", is_behind=True),
    "a folder in a linked folder": Fault("store/m/1", 0o777, "linked", "store/m", shown="linked/1", is_behind=True),
    "where all users may make files": Fault("store/m/1", 0o1777),
    "a link on the way": Fault("ways", 0o777, target="ways/current"),
    "a folder that is left again": Fault("ways", 0o777, target="ways/on/../../store/m/1"),
    "a link in a linked folder": Fault("ways", 0o777, "linked", "with_link", shown="linked/deep/1"),
    "back into the repository": Fault("ways", 0o777, target="ways/back"),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_link_is_refused_where_others_could_change_what_is_there(root: Path, fault: Fault) -> None:
    outside(root)
    base = root.parent
    (base / "ways" / "on").mkdir(parents=True)
    (base / "ways" / "current").symlink_to(base / "store/m/1")
    (base / "ways" / "back").symlink_to(root / "add_sub/1")
    (base / "with_link" / "deep").mkdir(parents=True)
    (base / "with_link" / "deep" / "1").symlink_to("../../ways/current")
    (root / fault.link).parent.mkdir(exist_ok=True)
    (root / fault.link).symlink_to(base / fault.target)
    name = fault.link.partition("/")[0]
    repository = Repository(str(root))
    trusted = repository.fingerprint(name)
    assert repository.fetch(name)
    place = (base / fault.place).resolve()
    before = stat.S_IMODE(place.stat().st_mode)
    place.chmod(fault.mode)
    told = refusal(root, name)
    who = "all users" if fault.mode & 0o002 else "its group"
    if fault.is_behind:
        assert told.startswith(f"{fault.shown} of model '{name}' lies behind a link, at {place}, and is not taken: ")
    else:
        assert told.startswith(f"{fault.shown or fault.link} of model '{name}' is a link to ")
    assert told.endswith(f": {place} can be changed by {who}: chmod go-w {place}")
    refused = repository.fingerprint(name)
    place.chmod(before)
    assert (refused != trusted, repository.fingerprint(name)) == (True, trusted), "a poll tries again"
    assert repository.fetch(name)


def test_a_folder_where_only_owners_replace_what_is_theirs_may_be_on_the_way(root: Path) -> None:
    """As pytest's own folders are below /tmp."""
    store = outside(root).parent
    store.chmod(0o1777)
    (root / "linked").symlink_to(store / "m")
    assert Repository(str(root)).fetch("linked")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["store", "store/m/1", "store/m/1/model.py", "ways/current", "repository/add_sub/2"])
def test_a_link_is_refused_where_others_own_what_is_there(root: Path, place: str) -> None:
    outside(root)
    ways = root.parent / "ways"
    ways.mkdir()
    ways.chmod(0o1777)
    (ways / "current").symlink_to(root.parent / "store/m/1")
    (root / "add_sub" / "2").symlink_to(ways / "current")
    Repository(str(root)).fetch("add_sub")
    os.chown(root.parent / place, 4242, -1, follow_symlinks=False)
    assert f"{root.parent / place} belongs to user 4242 and not to root: chown it, or copy it" in refusal(root)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_links_of_the_repositorys_owner_are_followed(root: Path) -> None:
    outside(root)
    (root / "add_sub" / "2").symlink_to(root.parent / "store/m/1")
    for path in (root, root / "add_sub", root / "add_sub" / "2"):
        os.chown(path, 4242, -1, follow_symlinks=False)
    assert Repository(str(root)).fetch("add_sub")


@pytest.mark.parametrize("rule", ["trusted", "modelcar"])
@pytest.mark.parametrize("target", ["/proc/self/environ", "/proc/self/cwd", "/proc/kmsg", "/proc", "/dev/stdin", "/"])
def test_no_link_leads_into_proc(root: Path, target: str, rule: LinkRule) -> None:
    (root / "add_sub" / "1" / "x").symlink_to(target)
    told = refusal(root, rule=rule)
    assert "it leads into /proc" in told or (target == "/" and "not followed" in told)


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_what_is_no_file_is_not_followed(root: Path, target: str) -> None:
    os.mkfifo(root.parent / "pipe")
    (root / "add_sub" / "1" / "model.onnx").symlink_to(root.parent / target)
    assert "is neither a folder nor a file" in refusal(root)


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


def test_a_version_that_is_a_link_to_another_changes_the_fingerprint(root: Path) -> None:
    repository = Repository(str(root))
    found = [repository.fingerprint("add_sub")]
    (root / "add_sub" / "2").symlink_to("1")
    found.append(repository.fingerprint("add_sub"))
    (root / "add_sub" / "3").mkdir()
    (root / "add_sub" / "2").unlink()
    (root / "add_sub" / "2").symlink_to("3")
    found.append(repository.fingerprint("add_sub"))
    assert len(set(found)) == 3


def test_links_that_lead_nowhere_hide_nothing_else(root: Path) -> None:
    for folder in (root, root / "add_sub" / "1"):
        (folder / "itself").symlink_to("itself")
        (folder / "there").symlink_to("back")
        (folder / "back").symlink_to("there")
        (folder / "gone").symlink_to("/nothing/here")
        (folder / "below").symlink_to("../add_sub/config.pbtxt/x/..")
    repository = Repository(str(root))
    assert repository.model_names() == ["add_sub"]
    before = repository.fingerprint("add_sub")
    assert repository.fetch("add_sub")
    changed(root / "add_sub" / "1" / "model.py")
    assert repository.fingerprint("add_sub") != before
    with pytest.raises(ModelNotFoundError):
        repository.fetch("itself")


@pytest.mark.parametrize("rule", ["trusted", "inside"])
def test_the_repository_may_itself_be_reached_through_a_link(root: Path, rule: LinkRule) -> None:
    current = root.parent / "current"
    current.symlink_to(root)
    (root / "add_sub" / "2").symlink_to(current / "add_sub" / "1")
    root.parent.chmod(0o777)  # who can change that can replace all of the repository
    repository = Repository(str(current), rule)
    assert repository.model_names() == ["add_sub"]
    assert repository.fetch("add_sub").folder.is_dir()
    before = repository.fingerprint("add_sub")
    shutil.copytree(root, root.parent / "next", symlinks=True)
    current.unlink()
    current.symlink_to("next")
    assert repository.fingerprint("add_sub") != before
    assert repository.fetch("add_sub").folder.is_dir()


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files and folders that are looked at."""
    found: list[str] = []
    place = storage_local._place

    def counted(links: Links, folder: Any, entry: os.DirEntry[str]) -> Any:
        found.append(f"{folder.shown}/{entry.name}")
        return place(links, folder, entry)

    monkeypatch.setattr(storage_local, "_place", counted)
    return found


def fill(folder: Path, files: int) -> None:
    folder.mkdir(parents=True)
    for number in range(files):
        (folder / f"{number}").touch()


@pytest.mark.parametrize("linked", [False, True])
def test_a_fingerprint_looks_at_the_nearest_files(root: Path, monkeypatch: pytest.MonkeyPatch, linked: bool) -> None:
    """A virtual environment has tens of thousands, and polls come again and again."""
    monkeypatch.setattr(storage_local, "MAX_WATCHED", 30)
    environment = root.parent / "env" if linked else root / "add_sub" / "env"
    fill(environment / "lib" / "site-packages", 200)
    if linked:
        (root / "add_sub" / "env").symlink_to(environment)
    found = looked_at(monkeypatch)
    repository = Repository(str(root))
    before = repository.fingerprint("add_sub")
    assert len(found) == 30
    assert {"add_sub/config.pbtxt", "add_sub/1/model.py"} <= set(found)
    changed(root / "add_sub" / "1" / "model.py")
    assert repository.fingerprint("add_sub") != before


def test_what_links_lead_to_is_looked_at_within_bounds(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_local, "MAX_LINKED", 30)
    for name in ("a", "b"):
        fill(root.parent / name / "deep", 200)
        (root / "add_sub" / name).symlink_to(root.parent / name)
    fill(root / "add_sub" / "z" / "deep" / "er", 50)
    (root / "add_sub" / "z" / "deep" / "er" / "x").symlink_to("/proc/self")
    found = looked_at(monkeypatch)
    assert "add_sub/z/deep/er/x of model" in refusal(root), "all of the repository itself is looked at"
    assert len([each for each in found if each.startswith(("add_sub/a/", "add_sub/b/"))]) <= 30


def test_each_folder_is_looked_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = outside(root)
    for number in range(20):
        (root / "add_sub" / f"out{number}").symlink_to(store)
        (root / "add_sub" / f"up{number}").symlink_to("../add_sub")
        (store / f"again{number}").symlink_to("../m")
    found = looked_at(monkeypatch)
    repository = Repository(str(root))
    repository.fetch("add_sub")
    assert len(found) == len(set(found)) == 40 + 3 + 20 + 3


def test_folders_on_the_way_of_many_links_are_looked_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = outside(root)
    for number in range(100):
        (root / "add_sub" / "1" / f"{number}.py").symlink_to(store / "1" / "model.py")
    read: list[str] = []
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: read.append(path) or readlink(path))
    Repository(str(root)).fetch("add_sub")
    assert len(read) < 100 * 2 + 50


@pytest.mark.parametrize(("links", "steps"), [(39, 1), (39, 100), (2, 300)])
def test_a_way_that_is_too_long_to_be_judged_is_refused(root: Path, links: int, steps: int) -> None:
    """Linux follows it."""
    for number in range(links):
        (root / "add_sub" / f"to{number}").symlink_to("../add_sub/" * steps + f"to{number + 1}")
    (root / "add_sub" / f"to{links}").write_text("")
    assert (root / "add_sub" / "to0").exists()
    judged = Links(str(root), "trusted")
    if links * steps < 100:
        assert judged.follow(str(root / "add_sub"), "to0") == ModelPlace(f"{root}/add_sub/to{links}", False, False)
    else:
        with pytest.raises(RefusedLinkError, match="it cannot be read: Too many levels of symbolic links"):
            judged.follow(str(root / "add_sub"), "to0")


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_a_link_to_what_others_could_put_there_later_is_refused(root: Path, mode: int) -> None:
    outside(root)
    (root / "add_sub" / "2").symlink_to(root.parent / "store" / "not" / "yet")
    assert Repository(str(root)).fetch("add_sub")
    assert refusal(root, rule="inside").endswith("leads out of the model repository")
    (root.parent / "store").chmod(mode)
    assert refusal(root).endswith(f"chmod go-w {root.parent}/store")


def test_a_configuration_is_not_read_through_a_link_that_is_refused(root: Path) -> None:
    """Loading on demand reads them before a model is loaded: some files of /proc never end."""
    repository = Repository(str(root))
    assert repository.local_folder("add_sub") == root / "add_sub"
    (root / "add_sub" / "config.pbtxt").unlink()
    (root / "add_sub" / "config.pbtxt").symlink_to("/proc/kmsg")
    assert repository.local_folder("add_sub") is None
    assert repository.local_folder("nothing") is None


def test_a_link_that_is_changed_while_it_is_judged_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, link = outside(root), root / "linked"
    link.symlink_to(store)
    judge = Links._fault

    def slowly(links: Links, *judged: Any) -> str:
        fault = judge(links, *judged)
        link.unlink()
        link.symlink_to("/")
        return fault

    monkeypatch.setattr(Links, "_fault", slowly)
    assert refusal(root, "linked") == (
        f"linked of model 'linked' is a link to {store} that is not followed: it has just been changed"
    )


def test_a_linked_folder_may_have_more_than_the_server_can_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = outside(root)
    (root / "linked").symlink_to(store)
    (store / "lost+found").mkdir()
    scandir = os.scandir

    def as_another_user(path: str) -> Any:
        if path.endswith(("lost+found", "add_sub/1")):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", as_another_user)
    assert Repository(str(root)).fetch("linked")
    with pytest.raises(EngineError, match="the folder of model 'add_sub' cannot be read: Permission denied"):
        Repository(str(root)).fetch("add_sub")


# Model cars: repositories in the mounts of another process


def test_links_to_the_files_of_another_process_need_the_rule_for_them(root: Path) -> None:
    outside(root)
    (root / "linked").symlink_to(f"/proc/{os.getppid()}/root{root.parent}/store/m")
    assert "needs --repository-links modelcar" in refusal(root, "linked")
    assert refusal(root, "linked", rule="inside").endswith("needs --repository-links modelcar")
    assert Repository(str(root), "modelcar").fetch("linked")
    (root.parent / "store").chmod(0o777)
    assert f"/root{root.parent}/store can be changed by all users" in refusal(root, "linked", rule="modelcar")


@pytest.fixture
def car(root: Path) -> Iterator[Path]:
    """A link, as KServe makes it, to a repository that is only in another process's mounts."""
    script = f"mount -t tmpfs none /mnt && mkdir /mnt/models && cp -a {root}/. /mnt/models/ && echo && exec cat"
    namespaces = ["--mount"] if os.geteuid() == 0 else ["--mount", "--map-root-user"]
    command = ["unshare", *namespaces, "sh", "-c", script]
    try:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    with process:
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("there are no mount namespaces to be had")
        link = root.parent / "car"
        link.symlink_to(f"/proc/{process.pid}/root/mnt/models")
        yield link
        process.kill()


def test_a_model_car_is_a_repository(root: Path, car: Path) -> None:
    repository = Repository(str(car), "modelcar")
    assert not Path(os.path.realpath(car)).exists()
    assert repository.model_names() == ["add_sub"]
    assert repository.fetch("add_sub").folder == car / "add_sub"
    before = repository.fingerprint("add_sub")
    changed(car / "add_sub" / "1" / "model.py")
    assert repository.fingerprint("add_sub") != before
    (car / "add_sub" / "2").symlink_to("1")
    (car / "add_sub" / "3").symlink_to(outside(root))
    assert repository.fetch("add_sub")
    (root.parent / "store").chmod(0o777)
    assert "add_sub/3 of model" in refusal(car, rule="modelcar")


@pytest.mark.parametrize("rule", ["trusted", "inside"])
def test_a_model_car_needs_its_rule(car: Path, rule: LinkRule) -> None:
    with pytest.raises(ConfigError, match="which needs --repository-links modelcar"):
        Repository(str(car), rule)


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
