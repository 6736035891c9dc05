"""Evicted blocks in files: they come back for later requests, also after a restart, and nothing in them is trusted."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import select
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.offload.block_file import BlockFile, Contents
from penstock.engines.offload.folder import ModelFolder
from penstock.engines.offload.offload import Offload
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import KVGroup, StateGroup
from support.engine import Driver
from support.simulated import generate

RAISE = 901
SIZE = 4
PROMPT = [100 + n for n in range(32)]
OTHERS = [[200 + 50 * k + n for n in range(40)] for k in range(3)]
"""Together they take all of the KV cache."""
WINDOWS = (KVGroup(SIZE), KVGroup(SIZE, 6))
STATES = StateGroup(2 * SIZE, 10, SIZE)

Start = Callable[..., Driver]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Drivers of engines that have nothing in memory, over the same folder."""
    monkeypatch.setattr("penstock.engines.offload.offload.CLOSING_SECONDS", 60.0)  # a busy disk is no failure
    drivers: list[Driver] = []

    def _start(
        groups: tuple[KVGroup, ...] = (KVGroup(SIZE),),
        num_blocks: int = 12,
        states: StateGroup | None = None,
        **scheduler: Any,
    ) -> Driver:
        blocks = num_blocks * len(groups)
        config = SimulatedConfig(kv_groups=groups, num_blocks=blocks, states=states, faults=f"raise={RAISE}")
        runner = SimulatedRunner(config, sleep=lambda _: None)
        drivers.append(Driver(runner, **{"kv_offload_dir": str(tmp_path / "kv"), **scheduler}))
        return drivers[-1]

    yield _start
    for driver in drivers:
        offload = core_of(driver).blocks
        if offload is not None and not offload._closing.is_set():
            driver.core.close()


def core_of(driver: Driver) -> EngineCore:
    assert isinstance(driver.core, EngineCore)
    return driver.core


def ask(driver: Driver, prompt: list[int], **params: Any) -> tuple[list[int], int]:
    """The tokens, and how many of the prompt were cached."""
    [request] = driver.add(prompt, 3, **params)
    driver.run()
    settle(driver)
    return driver.tokens[request], driver.cached[request]


def settle(driver: Driver) -> None:
    """Until all that was evicted is written."""
    core = core_of(driver)
    while core.scheduler.kv.tier is not None and core.scheduler.kv.tier._writing:
        assert select.select(core.wakeups, [], [], 60)[0]
        driver.step()


def fill(driver: Driver) -> None:
    for prompt in OTHERS:
        ask(driver, prompt)


def restart(driver: Driver, start: Start, **settings: Any) -> Driver:
    driver.core.close()
    return start(**settings)


@pytest.mark.parametrize("groups", [(KVGroup(SIZE),), WINDOWS], ids=["one group", "a window"])
def test_evicted_blocks_come_back(start: Start, groups: tuple[KVGroup, ...]) -> None:
    driver = start(groups)
    expected = generate(driver.core.info, PROMPT, 3)
    assert ask(driver, PROMPT) == (expected, 0)
    fill(driver)
    assert ask(driver, PROMPT) == (expected, 31)
    stats = driver.stats
    assert stats.offload.waits == 1
    assert stats.offload.loaded >= 8
    assert stats.offload.blocks >= 8
    assert (stats.offload.dropped, stats.offload.damaged) == (0, 0)
    assert stats.prefix_hits == 31


@pytest.mark.parametrize("groups", [(KVGroup(SIZE),), WINDOWS], ids=["one group", "a window"])
def test_a_restart_loses_nothing(start: Start, groups: tuple[KVGroup, ...]) -> None:
    """What was evicted is in the files already, the rest is written at the end."""
    driver = start(groups)
    answers = [ask(driver, prompt)[0] for prompt in (PROMPT, *OTHERS)]
    driver = restart(driver, start, groups=groups)
    assert [ask(driver, prompt) for prompt in (PROMPT, *OTHERS)] == [
        (answer, len(prompt) - 1) for answer, prompt in zip(answers, (PROMPT, *OTHERS), strict=True)
    ]


def test_states_come_back_with_their_blocks(start: Start) -> None:
    """After they were evicted, after a step that has failed, and after a restart: hits end at checkpoints."""
    driver = start(states=STATES, num_blocks=13)
    answers = [ask(driver, prompt)[0] for prompt in (PROMPT, *OTHERS)]
    assert ask(driver, PROMPT) == (answers[0], 24)
    fill(driver)
    [innocent], [guilty] = driver.add(PROMPT, 3), driver.add([7, RAISE, 9], 3)
    driver.run()
    assert driver.ends[guilty].error is not None
    assert (driver.tokens[innocent], driver.cached[innocent]) == (answers[0], 24)
    driver = restart(driver, start, states=STATES, num_blocks=13)
    for answer, prompt in zip(answers, (PROMPT, *OTHERS), strict=True):
        assert ask(driver, prompt) == (answer, (len(prompt) - 1) // 8 * 8)
    assert driver.stats.offload.damaged == 0


def test_what_continues_differently_hits_as_far_as_it_is_the_same(start: Start) -> None:
    driver = start()
    ask(driver, PROMPT)
    driver = restart(driver, start)
    longer = [*PROMPT[:18], *OTHERS[0][:5]]
    assert ask(driver, longer) == (generate(driver.core.info, longer, 3), 16)


def test_others_go_on_while_one_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    read, go_on = BlockFile.read, threading.Event()

    def _read(self: BlockFile, slot: int, block_hash: bytes) -> Contents | None:
        assert go_on.wait(60)
        return read(self, slot, block_hash)

    monkeypatch.setattr(BlockFile, "read", _read)
    [waits], [same] = driver.add(PROMPT, 3), driver.add(PROMPT, 3)
    [passes] = driver.add([7, 8, 9], 3)
    driver.run(until=lambda: passes in driver.ends)
    assert not driver.tokens[waits]
    assert driver.stats.num_waiting == 2
    go_on.set()
    driver.run()
    assert (driver.tokens[waits], driver.cached[waits]) == (expected, 31)
    assert (driver.tokens[same], driver.cached[same]) == (expected, 31)
    assert driver.stats.offload.waits == 1, "the second one finds what the first has loaded"


def test_many_prefixes_share_the_memory(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who finds no room waits for those that are being read, and gets all of its blocks."""
    monkeypatch.setattr("penstock.engines.offload.offload.READING_BYTES", 12 * (SIZE * 8 + 64))
    driver = start(num_blocks=64)
    prompts = [[1 + 40 * k + n for n in range(32)] for k in range(6)]
    answers = [ask(driver, prompt)[0] for prompt in prompts]
    driver = restart(driver, start, num_blocks=64)
    requests = [driver.add(prompt, 3)[0] for prompt in prompts]
    driver.run()
    assert [driver.tokens[request] for request in requests] == answers
    assert [driver.cached[request] for request in requests] == [31] * 6


def test_a_prefix_longer_than_the_memory_is_read_in_part(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start(num_blocks=64)
    expected, _ = ask(driver, PROMPT)
    monkeypatch.setattr("penstock.engines.offload.offload.READING_BYTES", 5 * (SIZE * 8 + 64))
    driver = restart(driver, start, num_blocks=64)
    assert ask(driver, PROMPT) == (expected, 5 * SIZE)


def test_who_waits_can_leave(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = start()
    ask(driver, PROMPT)
    fill(driver)
    go_on = threading.Event()
    monkeypatch.setattr(BlockFile, "read", lambda *_: go_on.wait(60) and None)
    [leaves] = driver.add(PROMPT, 3)
    driver.step()
    driver.abort(leaves)
    driver.run()
    assert driver.ends[leaves].finish_reason == "abort"
    go_on.set()
    assert ask(driver, [1, 2, 3])[0]


def test_a_read_that_takes_too_long_is_not_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    go_on = threading.Event()
    monkeypatch.setattr(BlockFile, "read", lambda *_: go_on.wait(60) and None)
    [late] = driver.add(PROMPT, 3)
    driver.step()
    driver.now += 60
    driver.step()
    driver.run()
    go_on.set()
    assert (driver.tokens[late], driver.cached[late]) == (expected, 0)
    assert "reading takes too long" in caplog.text
    assert ask(driver, PROMPT) == (expected, 31), "from memory"


def look_again(driver: Driver, after: float) -> None:
    """Ends a pause of so many seconds."""
    core = core_of(driver)
    assert core.scheduler.kv.tier is not None
    driver.now += after - 1
    driver.step()
    assert not core.scheduler.kv.tier.takes_more
    driver.now += 1
    driver.step()
    while not core.scheduler.kv.tier.takes_more:
        assert select.select(core.wakeups, [], [], 60)[0]
        driver.step()


def test_after_a_pause_the_files_are_used_again(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    driver = start()
    expected, _ = ask(driver, PROMPT)
    for pause in (60, 120):
        fill(driver)
        go_on = threading.Event()
        with monkeypatch.context() as patches:
            patches.setattr(BlockFile, "read", lambda *_: go_on.wait(60) and None)  # noqa: B023
            [late] = driver.add(PROMPT, 3)
            driver.step()
            driver.now += 5
            driver.step()
            driver.run()
            assert (driver.tokens[late], driver.cached[late]) == (expected, 0)
            go_on.set()
        assert f"not kept for {pause} s" in caplog.text
        caplog.clear()
        look_again(driver, pause)
        assert "evicted blocks are kept in" in caplog.text
        fill(driver)
        assert ask(driver, PROMPT) == (expected, 31), "from the files, which have it since before the pause"
    assert driver.stats.offload.damaged == 0


def test_files_are_not_looked_at_while_a_read_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next request would wait for it, too."""
    driver = start()
    ask(driver, PROMPT)
    fill(driver)
    core, go_on = core_of(driver), threading.Event()
    assert core.scheduler.kv.tier is not None
    assert isinstance(core.blocks, Offload)
    with monkeypatch.context() as patches:
        patches.setattr(BlockFile, "read", lambda *_: go_on.wait(60) and None)
        driver.add(PROMPT, 3)
        driver.step()
        driver.now += 5
        driver.step()
        driver.run()
        driver.now += 60
        for _ in range(3):
            driver.step()
            core.blocks._writer.submit(int).result(60)
        assert not core.scheduler.kv.tier.takes_more
        go_on.set()
    while not core.scheduler.kv.tier.takes_more:
        assert select.select(core.wakeups, [], [], 60)[0]
        driver.step()


def test_a_prefix_cache_that_is_emptied_in_a_pause_stays_empty(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    first = start()
    expected, _ = ask(first, PROMPT)
    first.core.close()

    def acquire(self: ModelFolder) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(ModelFolder, "acquire", acquire)
        driver = start()
        core_of(driver)._reset_prefix_cache()
    look_again(driver, 60)
    assert ask(driver, PROMPT) == (expected, 0)


def test_files_that_could_not_be_emptied_are_emptied_after_the_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)

    def broken(self: BlockFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    core = core_of(driver)
    with monkeypatch.context() as patches:
        patches.setattr(BlockFile, "clear", broken)
        core._reset_prefix_cache()
        assert select.select(core.wakeups, [], [], 60)[0]
        driver.step()
    look_again(driver, 60)
    assert ask(driver, PROMPT) == (expected, 0)


def test_a_step_that_fails_is_run_again_with_its_blocks(start: Start) -> None:
    """The failed step has left garbage behind."""
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    [innocent], [guilty] = driver.add(PROMPT, 3), driver.add([7, RAISE, 9], 3)
    driver.run()
    assert driver.ends[guilty].error is not None
    assert (driver.tokens[innocent], driver.cached[innocent]) == (expected, 31)


def test_blocks_that_could_not_be_loaded_are_loaded_again(start: Start) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    runner = core_of(driver).runner
    assert isinstance(runner, SimulatedRunner)
    write_blocks, failures = runner.write_blocks, iter([MemoryError()])

    def _write_blocks(block_ids: Sequence[int], contents: Sequence[Contents]) -> None:
        for failure in failures:
            raise failure
        write_blocks(block_ids, contents)

    runner.write_blocks = _write_blocks  # type: ignore[method-assign]
    [beside] = driver.add([7, 8, 9], 15)
    driver.step()
    [request] = driver.add(PROMPT, 3)
    driver.run(until=lambda: driver.stats.offload.waits == 1)
    core = core_of(driver)
    assert core.blocks is not None
    while core.next_look is not None:  # without a step, so that both are in the next one
        assert select.select(core.wakeups, [], [], 60)[0]
        core.blocks.advance()
    driver.run()
    assert driver.stats.step_failures == 1
    assert (driver.tokens[request], driver.cached[request]) == (expected, 31)
    assert driver.tokens[beside] == generate(driver.core.info, [7, 8, 9], 15)


def _flip(folder: Path) -> None:
    data = bytearray((folder / "blocks").read_bytes())
    for place in range(0, len(data), SIZE * 8):
        data[place] ^= 1
    (folder / "blocks").write_bytes(data)


def _shift(folder: Path) -> None:
    """Each slot has another one's contents, which are whole."""
    data = (folder / "blocks").read_bytes()
    (folder / "blocks").write_bytes(data[SIZE * 8 :] + data[: SIZE * 8])


def _cut(folder: Path) -> None:
    for name in ("blocks", "index"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2 - 3])


def _scramble_index(folder: Path) -> None:
    size = (folder / "index").stat().st_size
    (folder / "index").write_bytes(random.Random(1).randbytes(size))


def _other_key(folder: Path) -> None:
    (folder.parent / "key").write_bytes(bytes(32))


@pytest.mark.parametrize("damage", [_flip, _shift, _cut, _scramble_index, _other_key])
def test_damaged_files_are_not_used(start: Start, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    driver = start()
    answers = [ask(driver, prompt)[0] for prompt in (PROMPT, *OTHERS)]
    driver.core.close()
    damage(folder_of(tmp_path))
    driver = start()
    assert [ask(driver, prompt)[0] for prompt in (PROMPT, *OTHERS)] == answers
    again = restart(driver, start)
    assert ask(again, PROMPT) == (answers[0], 31), "what was damaged has been written again"


def folder_of(tmp_path: Path) -> Path:
    [folder] = [path for path in (tmp_path / "kv").iterdir() if path.is_dir()]
    return folder


def test_one_damaged_block_ends_the_prefix_there(start: Start, tmp_path: Path) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    driver.core.close()
    path = folder_of(tmp_path) / "blocks"
    data = bytearray(path.read_bytes())
    data[3 * SIZE * 8 + 5] ^= 128
    path.write_bytes(data)
    driver = start()
    tokens, cached = ask(driver, PROMPT)
    assert tokens == expected
    assert cached in range(0, 31, SIZE)
    assert driver.stats.offload.damaged == 1


def test_a_full_disk_turns_it_off(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def _write(self: BlockFile, slot: int, block_hash: bytes, contents: Contents) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    driver = start()
    expected, _ = ask(driver, PROMPT)
    monkeypatch.setattr(BlockFile, "write", _write)
    fill(driver)
    assert ask(driver, PROMPT) == (expected, 0)
    assert driver.stats.offload.dropped
    assert not driver.stats.offload.blocks
    assert caplog.text.count("No space left on device") == 1
    monkeypatch.undo()
    look_again(driver, 60)
    fill(driver)
    assert ask(driver, PROMPT) == (expected, 31)


def test_a_server_starts_on_a_full_disk(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A new version has a new folder, for which there is no room."""

    def acquire(self: ModelFolder) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ModelFolder, "acquire", acquire)
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    assert ask(driver, PROMPT) == (expected, 0)
    assert driver.stats.offload.dropped
    assert "No space left on device" in caplog.text


def test_a_folder_is_one_process_s(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes it over once it is free."""
    monkeypatch.setattr("penstock.engines.offload.offload._RETRY_SECONDS", 0.01)
    first, second = start(), start()
    expected, _ = ask(first, PROMPT)
    assert ask(second, PROMPT) == (expected, 0)
    fill(second)
    assert ask(second, PROMPT) == (expected, 0)
    assert second.stats.offload.saved == 0
    first.core.close()
    core = core_of(second)
    assert core.blocks is not None
    assert select.select(core.blocks.wakeups, [], [], 60)[0]
    second.step()
    assert second.stats.offload.blocks
    fill(second)
    assert ask(second, PROMPT) == (expected, 31)


def test_the_prefix_cache_is_emptied_while_the_folder_is_another_process_s(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that one leaves there is deleted, and nobody looks for it."""
    monkeypatch.setattr("penstock.engines.offload.offload._RETRY_SECONDS", 0.01)
    first, second = start(), start()
    expected, _ = ask(first, PROMPT)
    core_of(second)._reset_prefix_cache()
    first.core.close()
    assert select.select(core_of(second).wakeups, [], [], 60)[0]
    assert ask(second, PROMPT) == (expected, 0)
    fill(second)
    assert ask(second, PROMPT) == (expected, 31)
    assert second.stats.offload.damaged == 0


def test_a_file_that_cannot_be_opened_leaves_the_folder_free(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same process may try again, when the model is loaded again."""

    def broken(self: BlockFile) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patches:
        patches.setattr(BlockFile, "kept", broken)
        with pytest.raises(EngineError, match="Input/output error"):
            start()
    driver = start()
    ask(driver, PROMPT)
    fill(driver)
    assert driver.stats.offload.saved


def test_a_folder_that_is_deleted_while_it_is_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ModelFolder(tmp_path / "kv", "a model")
    lock = fcntl.flock

    def late(descriptor: int, how: int) -> None:
        shutil.rmtree(folder.path)
        lock(descriptor, how)

    with monkeypatch.context() as patches:
        patches.setattr(fcntl, "flock", late)
        assert not folder.acquire()
    assert folder.acquire()
    assert folder.path.is_dir()
    folder.release()


def test_the_bytes_are_bounded(start: Start, tmp_path: Path) -> None:
    driver = start(kv_offload_bytes=20 * (SIZE * 8 + 64))
    rng = random.Random(5)
    prompts = [[rng.randrange(800) for _ in range(24)] for _ in range(12)]
    for prompt in prompts * 2:
        assert ask(driver, prompt)[0] == generate(driver.core.info, prompt, 3)
    driver = restart(driver, start, kv_offload_bytes=20 * (SIZE * 8 + 64))
    assert driver.stats.offload.blocks == 20
    assert sum(path.stat().st_size for path in folder_of(tmp_path).iterdir()) <= 20 * (SIZE * 8 + 64)
    assert ask(driver, prompts[-1])[1] == 23
    driver = restart(driver, start, kv_offload_bytes=5 * (SIZE * 8 + 64))
    assert driver.stats.offload.blocks <= 5
    for prompt in prompts:
        assert ask(driver, prompt)[0] == generate(driver.core.info, prompt, 3)


def test_blocks_of_adapters_end_with_their_process(start: Start) -> None:
    """Each process counts the keys of adapters from the start: the same key may mean other weights."""
    driver = start()
    ask(driver, PROMPT, adapter="a")
    driver = restart(driver, start)
    assert ask(driver, PROMPT)[1] == 0
    driver = restart(driver, start)
    assert ask(driver, PROMPT)[1] == 31
    assert ask(driver, PROMPT, adapter="a")[1] == 0
    fill(driver)
    assert ask(driver, PROMPT, adapter="a")[1] == 31


def test_other_layouts_have_other_folders(start: Start, tmp_path: Path) -> None:
    driver = start()
    ask(driver, PROMPT)
    driver = restart(driver, start, groups=(KVGroup(2 * SIZE),))
    assert ask(driver, PROMPT)[1] == 0
    assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == 2


def test_an_emptied_prefix_cache_is_empty_in_files_too(start: Start) -> None:
    driver = start()
    expected, _ = ask(driver, PROMPT)
    fill(driver)
    core_of(driver)._reset_prefix_cache()
    assert ask(driver, PROMPT) == (expected, 0)
    core_of(driver)._reset_prefix_cache()
    driver = restart(driver, start)
    assert ask(driver, PROMPT) == (expected, 0)


def test_files_are_for_this_user_alone(start: Start, tmp_path: Path) -> None:
    ask(start(), PROMPT)
    for path in (tmp_path / "kv").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_key_that_others_can_read_is_refused(start: Start, tmp_path: Path) -> None:
    start()
    (tmp_path / "kv" / "key").chmod(0o644)
    with pytest.raises(EngineError, match="nobody else"):
        start()


def test_folders_that_nobody_uses_go(start: Start, tmp_path: Path) -> None:
    old, used = tmp_path / "kv" / ("a" * 32), tmp_path / "kv" / ("b" * 32)
    for folder in (old, used):
        folder.mkdir(parents=True)
        (folder / "blocks").write_bytes(b"x")
        (folder / "lock").touch()
    foreign = tmp_path / "kv" / ("c" * 32)
    foreign.mkdir()
    (foreign / "letter").write_text("not ours")
    (foreign / "lock").touch()
    for path in (*old.iterdir(), *foreign.iterdir(), used / "lock"):
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    start()
    assert not old.exists()
    assert used.exists()
    assert (foreign / "letter").exists()


def test_a_folder_that_is_just_being_made_stays(start: Start, tmp_path: Path) -> None:
    """Another process is about to lock it."""
    fresh = tmp_path / "kv" / ("d" * 32)
    fresh.mkdir(parents=True)
    start()
    assert fresh.is_dir()


def test_a_folder_is_in_use_until_its_process_leaves_it(tmp_path: Path) -> None:
    """Even if that one has written nothing for a week."""
    folder = ModelFolder(tmp_path / "kv", "a model")
    assert folder.acquire()
    os.utime(folder.path / "lock", (time.time() - 8 * 86400,) * 2)
    folder.release()
    ModelFolder(tmp_path / "kv", "another model").remove_unused()
    assert folder.path.is_dir()


def test_what_cannot_be_is_refused_by_name(start: Start, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="kv-offload-bytes"):
        start(kv_offload_bytes=50)
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="kv-offload-dir"):
        start(kv_offload_dir=str(tmp_path / "file"))
    with pytest.raises(ValueError, match="kv-offload-dir"):
        SchedulerConfig(kv_offload_dir="x", enable_prefix_caching=False)
    offload = SchedulerConfig(kv_offload_dir=str(tmp_path))
    with pytest.raises(UnsupportedError, match="kv-offload-dir"):
        load_core(EngineSpec(runner="simulated", scheduling="engine", scheduler=offload), time.monotonic)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_asked_the_answers_are_the_same(start: Start, seed: int) -> None:
    """Short of blocks, with preemptions, aborts and steps that fail; the driver checks the books after every step."""
    rng = random.Random(seed)
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16}
    settings |= {"kv_offload_bytes": 40 * (SIZE * 8 + 64)}
    settings |= {"groups": WINDOWS if seed in (1, 3) else (KVGroup(SIZE),), "states": STATES if seed > 3 else None}
    hit = 16 if seed > 3 else 23
    driver = start(num_blocks=16, **settings)
    stems = [[rng.randrange(800) for _ in range(24)] for _ in range(5)]
    for turn in range(3):
        requests: dict[int, tuple[list[int], int]] = {}
        for _ in range(25):
            prompt = rng.choice(stems)[: rng.randrange(1, 25)] + [rng.randrange(800) for _ in range(rng.randrange(4))]
            if rng.random() < 0.05:
                prompt.append(RAISE)
            count = rng.randrange(1, 9)
            [request] = driver.add(prompt, count)
            requests[request] = prompt, count
            if rng.random() < 0.1:
                driver.abort(rng.choice(list(requests)))
            for _ in range(rng.randrange(4)):
                driver.step()
        driver.run()
        for request, (prompt, count) in requests.items():
            end = driver.ends[request]
            if end.error is None and end.finish_reason != "abort":
                assert driver.tokens[request] == generate(driver.core.info, prompt, count)
        # a slow thread may have kept all blocks of the above out of the files: not those of the last prompt
        prompt = [800 + 24 * turn + n for n in range(24)]
        expected = generate(driver.core.info, prompt, 3)
        assert ask(driver, prompt) == (expected, 0)
        driver = restart(driver, start, num_blocks=16, **settings)
        assert ask(driver, prompt) == (expected, hit)
