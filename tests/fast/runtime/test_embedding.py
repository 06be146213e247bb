"""A runtime in an app: it closes from any thread, survives a fork and an interrupt, and shows
what it is.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from weakref import WeakSet

import pytest
from runtime_makers import open_runtime, python_environment

from personalpeft import HomeError
from personalpeft.store import locks
from personalpeft.store.ledger import Ledger


def test_close_ends_streams_while_another_thread_begins_one(home: Path, tmp_path: Path) -> None:
    with open_runtime(tmp_path / "other") as other, open_runtime(home) as runtime:
        late = other.user("bo").stream("hello")
        streams = [runtime.user("ada").stream("hello") for _ in range(2)]
        for stream in streams:
            next(stream)
        beginner = threading.Thread(target=runtime._services.streams.add, args=(late,))
        resumed = itertools.count()

        def begin(frame: FrameType, event: str, argument: object) -> None:
            """Begin a stream in another thread after the first stream was read from the set."""
            is_resumed = event == "call" and frame.f_code is WeakSet.__iter__.__code__
            if is_resumed and next(resumed) == 1:
                beginner.start()
                beginner.join(0.2)

        sys.setprofile(begin)
        try:
            runtime.close()
        finally:
            sys.setprofile(None)
        beginner.join(20)
        assert [stream.reply.finish_reason for stream in streams] == ["cancelled"] * 2


def test_close_closes_the_home_although_a_turn_cannot_be_recorded(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ledger: Ledger, user: str, **turn: object) -> None:
        raise HomeError("The disk is full.", hint="Free some space.")

    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        stream = ada.stream("hello")
        next(stream)
        monkeypatch.setattr(Ledger, "add_turn", fail)
        with pytest.raises(HomeError, match="full"):
            runtime.close()
        with pytest.raises(HomeError, match="not open"):
            ada.turns()


FORK = """
import os, signal, sys, threading, time
import personalpeft

runtime = personalpeft.open(sys.argv[1], backend="fake")
ada = runtime.user("ada")
stream = ada.stream("open at the fork")
next(stream)
entered, leave = threading.Event(), threading.Event()

def cancelled():
    entered.set()
    leave.wait(60)
    return False

chat = threading.Thread(target=lambda: ada.chat("hello", cancelled=cancelled))
chat.start()
entered.wait(60)
child = os.fork()
if child == 0:
    try:
        next(stream)
    except personalpeft.HomeError:
        sys.exit(7)
    os._exit(1)
for _ in range(2000):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        break
    time.sleep(0.01)
else:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    status = signal.SIGKILL
print(os.waitstatus_to_exitcode(status), len(ada.turns()))
leave.set()
chat.join()
stream.close()
print(len(ada.turns()))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_forked_child_ends_and_leaves_the_parents_streams_alone(
    home: Path, shared_cache: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(home)],
        capture_output=True,
        text=True,
        check=False,
        env=python_environment(shared_cache),
    )
    assert (done.stdout.split(), done.stderr) == (["7", "0", "2"], "")


def test_interrupt_at_any_moment_frees_the_write_lock(home: Path) -> None:
    source = locks.__file__
    with open_runtime(home) as runtime:
        for moment in itertools.count():
            moments = itertools.count()

            def interrupt(
                frame: FrameType, event: str, argument: object, *, moments=moments, moment=moment
            ) -> None:
                """Raise where Python may call the handler of a signal, once."""
                at_start = event == "call" and frame.f_back is not None
                code = frame.f_back.f_code if at_start and frame.f_back else frame.f_code
                if (
                    event in ("call", "c_return")
                    and code.co_filename == source
                    and next(moments) == moment
                ):
                    raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                runtime.user(f"ada-{moment}")
            except KeyboardInterrupt:
                pass
            else:
                break
            finally:
                sys.setprofile(None)
            writer = threading.Thread(target=runtime.user, args=(f"bo-{moment}",))
            writer.start()
            writer.join(5)
            assert not writer.is_alive(), f"the lock is held after moment {moment}"
        assert moment > 10
        assert runtime.user(f"bo-{moment - 1}", create=False)


_LEARNING_PROGRAM = """
import sys, threading, time
import personalpeft
from runtime_makers import correct

runtime = personalpeft.open(sys.argv[1], backend="fake")
ada = runtime.user("ada")
correct(ada, 8)
began = threading.Event()

def show(stage, done):
    began.set()
    time.sleep(0.05)

threading.Thread(target=lambda: ada.learn(progress=show), daemon=True).start()
began.wait()
"""


def test_learn_that_the_end_of_the_program_stops_logs_no_fault(
    home: Path, shared_cache: Path
) -> None:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(
        [sys.executable, "-c", _LEARNING_PROGRAM, str(home)],
        capture_output=True,
        text=True,
        check=False,
        env=python_environment(shared_cache) | paths,
    )
    assert ended.returncode == 0, ended.stderr
    assert "failed" not in ended.stderr
    with open_runtime(home) as runtime:
        assert runtime.user("ada").learn().live


def test_runtime_and_user_show_what_they_are(home: Path) -> None:
    with open_runtime(home) as runtime:
        assert repr(runtime) == f"Runtime({str(home)!r}, base='fake', backend='fake')"
        assert repr(runtime.user("ada")) == "User('ada')"
