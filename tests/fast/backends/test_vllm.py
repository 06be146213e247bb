"""What the vLLM backend promises where servers, networks and other programs fail, on a server that fails on demand."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from backend_makers import Writing, Written, adapter, attach, composed, row, written
from vllm_double import NO_LOAD, Double, Open, doubled, failed, know, said, settled

from personalpeft.adapters.formats.published import FILES, compute_digest, read_published_adapter
from personalpeft.backends.base import Backend, Continuation
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import (
    BaseMismatch,
    InvalidInput,
    NotFound,
    PersonalPeftError,
    ServingFailed,
)
from personalpeft.settings import Settings, VllmServer, resolve
from personalpeft.types import Message, Sampling, Stack, StackEntry

pytestmark = pytest.mark.exhaustive

# Stacks and their names


def test_a_stack_is_registered_once_under_its_digest_from_a_folder_that_anybody_can_check(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    attach(backend, "one", composed(backend, 1))
    names = [name for name in double.known if not name.startswith(backend._registry.bare_base.name)]
    (name,) = names
    digest = name.split(":")[1]
    folder = Path(double.known[name])
    assert folder.name == digest
    assert compute_digest({file: (folder / file).read_bytes() for file in FILES}) == digest
    printed = subprocess.run(
        ["sha256sum", *FILES], cwd=folder, capture_output=True, check=True
    ).stdout
    whole = subprocess.run(["sha256sum"], input=printed, capture_output=True, check=True).stdout
    assert whole.decode().split()[0] == digest


def test_a_rank_that_servers_have_no_room_for_is_filled_up(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    attach(backend, "odd", composed(backend, 1, rank=11))
    ranks = {json.loads(Path(path, FILES[0]).read_text())["r"] for path in double.known.values()}
    assert ranks == {8, 16}


def test_rows_without_a_stack_name_one_that_changes_nothing(double: Double, open_on: Open) -> None:
    """A batch with others' stacks would answer them with somebody else's."""
    backend = open_on(double)
    said(backend, None)
    assert "base" not in {body["model"] for path, body in double.asked if path == "/v1/completions"}


def test_a_server_that_has_restarted_is_told_again_and_nobody_notices(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    before = said(backend, "one"), said(backend, None)
    double.restart()
    assert (said(backend, "one"), said(backend, None)) == before


def test_many_rows_that_find_a_stack_lost_have_it_told_once(double: Double, open_on: Open) -> None:
    backend = open_on(double, rows=8)
    attach(backend, "one", composed(backend, 1))
    alone = said(backend, "one")
    double.restart()
    # So slow that all of them find it lost before the first has had it told again.
    double.load_seconds = 0.3
    double.asked.clear()
    replies = written(backend, [row(backend, "hello", "one") for _ in range(8)])
    assert {reply.text for reply in replies} == {alone}
    loads = [body["lora_name"] for path, body in double.asked if path == "/v1/load_lora_adapter"]
    assert (
        loads.count(backend._attached.get("one").name)
        == loads.count(backend._registry.bare_base.name)
        == 1
    )


def test_a_cache_that_nothing_can_be_written_to_only_means_that_torch_is_asked_again(
    double: Double, open_on: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("personalpeft.backends.vllm.model_check.tempfile.TemporaryDirectory", full)
    assert said(open_on(double), None)


def test_a_stack_that_is_dropped_is_forgotten_only_after_its_last_row(
    double: Double, open_on: Open
) -> None:
    double.token_seconds = 0.05
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    (name,) = set(double.known) - {backend._registry.bare_base.name}
    folder = Path(double.known[name])
    writing = Writing(backend)
    reply = writing.join(row(backend, "hello", "one"))
    with pytest.raises(RuntimeError):
        backend.detach("one")
    while len(reply.tokens) < 4:
        writing.step()
        assert name in double.known
        assert folder.is_dir()
    writing.finish()
    backend.detach("one")
    assert settled(lambda: name not in double.known and not folder.exists())


def test_a_key_that_comes_again_while_it_goes_is_there(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    stack = composed(backend, 1)
    attach(backend, "one", stack)
    whole = said(backend, "one")
    for _ in range(10):
        backend.detach("one")
        attach(backend, "one", stack)
    assert said(backend, "one") == whole


def test_two_programs_on_one_server_do_not_take_from_each_other(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    cache = tmp_path / "shared"
    one, two = (open_on(double, cache=cache) for _ in range(2))
    for backend in (one, two):
        attach(backend, "key", composed(backend, 1))
    whole = said(one, "key")
    assert said(two, "key") == whole
    one.close()
    assert said(two, "key") == whole
    assert not any(name.endswith(one._registry._folders.process) for name in double.known)


def test_what_a_killed_program_left_behind_goes_when_the_next_one_opens(
    double: Double, open_on: Open, tmp_path: Path, tiny_base: Base
) -> None:
    cache = tmp_path / "cache"
    know(double, cache)
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from backend_makers import attach, composed
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.registry import find_card
from personalpeft.settings import VllmServer
base = resolve_base(find_card("tiny-random"), cache=Path({str(tiny_base.folder.parent.parent)!r}))
backend = VllmBackend(base, cache=Path({str(cache)!r}), server=VllmServer({double.url!r}), entropy=os.urandom)
attach(backend, "one", composed(backend, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    left = [Path(path) for path in double.known.values()]
    assert len(left) == 2
    assert all(path.is_dir() for path in left)

    backend = open_on(double, cache=cache)
    assert set(double.known) == {backend._registry.bare_base.name}
    assert not any(path.exists() for path in left)
    assert sorted(path.name for path in (cache / "served").iterdir()) == [
        backend._registry._folders.process,
        f"{backend._registry._folders.process}.lock",
    ]


def test_closing_leaves_nothing_on_the_server_and_nothing_on_the_disk(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    backend.close()
    backend.close()
    assert not double.known
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_never_more_stacks_than_the_server_has_room_for(tiny_base: Base, open_on: Open) -> None:
    with doubled(Double(tiny_base, slots=3)) as small:
        backend = open_on(small, slots=32)
        assert backend.slots == 2
        backend.close()
    with (
        doubled(Double(tiny_base, slots=1)) as tiny,
        pytest.raises(ServingFailed) as caught,
    ):
        open_on(tiny)
    assert "--max-loras" in caught.value.hint


def test_servers_that_find_stacks_themselves_are_told_of_none(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    double.resolver, double.updates = place, False
    backend = open_on(double, folder=place, resolves=True)
    attach(backend, "one", composed(backend, 1))
    whole = said(backend, "one")
    assert double.times("/v1/load_lora_adapter") == 0
    (digest,) = (
        path.name
        for path in place.glob("*/*")
        if path.name != backend._registry.bare_base.folder.digest
    )
    assert read_published_adapter(place, digest, FILES[1])
    for strange in ("../" + digest, digest.upper(), "0" * 64):
        with pytest.raises(NotFound):
            read_published_adapter(place, strange, FILES[1])
    # Taken away by whoever cleans that place: it is put there again.
    backend._registry._folders.remove(digest)
    assert said(backend, "one") == whole


# Rows


def test_what_breaks_off_for_one_row_ends_that_row_alone(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    for seed, key in enumerate(("one", "two")):
        attach(backend, key, composed(backend, seed))
    whole = said(backend, "two")
    double.breaks_off.append(
        next(name for name in double.known if backend._attached.get("one").name == name)
    )
    engine_rows = [backend.admit(row(backend, "hello", key)) for key in ("one", "two")]
    text, failed = "", None
    while text != whole or failed is None:
        for piece in backend.step():
            if piece.error is not None:
                assert piece.index == engine_rows[0]
                failed = piece.error
                backend.remove(piece.index)
            elif piece.index == engine_rows[1]:
                text += piece.text
    assert isinstance(failed, ServingFailed)
    assert backend.occupancy().num_sequences == 0


def test_a_reply_that_ends_without_saying_why_has_failed(double: Double, open_on: Open) -> None:
    """Half a reply must not pass for a whole one, by which a learn would judge."""
    backend = open_on(double)
    for finish in ("abort", "error", None):
        double.finish = finish
        number = backend.admit(row(backend, "hello", max_tokens=40))
        assert number is not None
        assert isinstance(failed(backend), ServingFailed)
        backend.remove(number)


def test_a_fault_in_the_middle_of_a_reply_is_not_asked_for_again(
    double: Double, open_on: Open
) -> None:
    """What came before it would be said twice."""
    backend = open_on(double)
    double.late_error = "The model does not exist."
    with pytest.raises(ServingFailed):
        written(backend, [row(backend, "hello", max_tokens=8)])


def test_a_folder_stays_a_while_after_a_row_on_it_was_dropped(
    double: Double, open_on: Open
) -> None:
    """A server that finds none for a row in its queue ends itself."""
    double.token_seconds = 0.05
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    (name,) = set(double.known) - {backend._registry.bare_base.name}
    folder = Path(double.known[name])
    number = backend.admit(row(backend, "hello", "one", max_tokens=30))
    assert number is not None
    backend.remove(number)
    backend.detach("one")
    time.sleep(0.5)
    assert folder.is_dir()
    assert settled(lambda: not folder.exists())


def test_who_may_look_into_the_place_may_read_what_lies_there(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    for mode in (0o700, 0o755):
        place = tmp_path / f"{mode:o}"
        place.mkdir()
        place.chmod(mode)
        before = os.umask(0o077)
        try:
            open_on(double, folder=place)
        finally:
            os.umask(before)
        assert {path.stat().st_mode & 0o777 for path in place.rglob("*") if path.is_dir()} == {mode}
        assert {path.stat().st_mode & 0o777 for path in place.rglob("adapter_*")} == {mode & 0o644}


def test_a_row_that_leaves_drops_its_connection(double: Double, open_on: Open) -> None:
    double.token_seconds = 0.05
    backend = open_on(double)
    number = backend.admit(row(backend, "hello", max_tokens=32))
    assert number is not None
    while not backend.step():
        pass
    backend.remove(number)
    assert double.dropped.wait(10)


def test_prompts_travel_as_tokens_and_what_is_kept_of_them_is_the_owners(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    double.asked.clear()
    written(backend, [row(backend, "hello", owner=owner) for owner in ("zora", "zora", "bo")])
    backend.clear_cache()
    written(backend, [row(backend, "hello", owner="zora")])
    bodies = [body for path, body in double.asked if path == "/v1/completions"]
    assert all(body["prompt"] == list(row(backend, "hello").prompt_tokens) for body in bodies)
    assert [
        len({body["cache_salt"] for body in bodies[:3]}),
        len({body["cache_salt"] for body in bodies}),
    ] == [2, 3]
    assert "zora" not in json.dumps(bodies)


def test_a_slow_load_does_not_stop_the_replies_beside_it(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    double.load_seconds = 1.0
    loading = threading.Thread(target=attach, args=(backend, "one", composed(backend, 1)))
    loading.start()
    began = time.monotonic()
    assert said(backend, None)
    assert time.monotonic() - began < 1.0
    loading.join()
    assert said(backend, "one")


def test_a_load_that_fails_takes_no_slot_and_says_which_option_is_missing(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double, slots=1)
    double.instead["/v1/load_lora_adapter"] = [(500, NO_LOAD)]
    with pytest.raises(ServingFailed, match="rank") as caught:
        attach(backend, "one", composed(backend, 1))
    assert "--max-lora-rank" in caught.value.hint
    attach(backend, "one", composed(backend, 1))
    assert said(backend, "one")


def test_a_server_that_is_busy_for_a_moment_is_asked_again(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    double.instead["/v1/load_lora_adapter"] = [(503, "starting"), (429, "full")]
    attach(backend, "one", composed(backend, 1))
    double.instead["/v1/completions"] = [(503, "starting"), (429, "full")]
    assert said(backend, "one")


def test_patience_bounds_what_is_tried_again_however_long_each_try_takes(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double, timeout=0.5, patience=1.0)
    double.load_seconds = 2.0
    began = time.monotonic()
    with pytest.raises(ServingFailed):
        attach(backend, "one", composed(backend, 1))
    assert time.monotonic() - began < 8


def test_a_piece_that_is_none_ends_its_row_alone(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    double.odd = -1
    number = backend.admit(row(backend, "hello"))
    assert number is not None
    assert isinstance(failed(backend), ServingFailed)
    backend.remove(number)
    double.odd = 0
    assert said(backend, None)


def test_replies_are_asked_for_with_nothing_left_to_the_models_own_settings(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    said(backend, None)
    body = double.asked[-1][1]
    assert (body["repetition_penalty"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)


def test_replies_one_after_another_take_one_connection_and_none_counts_as_cancelled(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    stack = composed(backend, 1)
    attach(backend, "one", stack)
    said(backend, "one")
    before = double.connections
    for _ in range(5):
        said(backend, "one", max_tokens=3)
    assert double.connections - before <= 1
    began = time.monotonic()
    backend.detach("one")
    attach(backend, "one", stack)
    assert time.monotonic() - began < 1.5


def test_closing_at_once_after_stacks_have_left_leaves_no_name(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double, slots=5)
    for seed in range(5):
        attach(backend, f"s{seed}", composed(backend, seed))
    number = backend.admit(row(backend, "hello", "s0"))
    assert number is not None
    backend.remove(number)
    for seed in range(5):
        backend.detach(f"s{seed}")
    backend.close()
    assert not double.known
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_a_name_that_could_not_be_forgotten_keeps_its_folder_for_the_next_program(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    double.instead["/v1/unload_lora_adapter"] = [(500, "busy")]
    backend.close()
    assert [Path(path).is_dir() for path in double.known.values()] == [True]
    later = open_on(double, cache=tmp_path / "cache")
    assert set(double.known) == {later._registry.bare_base.name}


def test_a_server_that_is_too_busy_to_answer_is_not_taken_for_one_that_is_gone(
    double: Double, open_on: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still knows the names, and may look for their folders."""
    monkeypatch.setattr("personalpeft.backends.vllm.transport._CONNECT_SECONDS", 0.5)
    double.hangs_up = True
    backend = open_on(double)
    with double.busy():
        began = time.monotonic()
        with pytest.raises(ServingFailed, match=r"within 0\.5 s"):
            said(backend, None)
        assert time.monotonic() - began < 8
        backend.close()
    assert [Path(path).is_dir() for path in double.known.values()] == [True]


def test_a_server_that_is_gone_keeps_no_folder(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    with doubled(Double(double.base)) as leaving:
        leaving.hangs_up = True
        backend = open_on(leaving)
    backend.close()
    assert not list((tmp_path / "cache" / "served").iterdir())


def _no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("personalpeft.adapters.formats.published.tempfile.mkdtemp", full)


def test_a_place_without_room_is_said_with_a_way_out_when_a_home_is_opened(
    double: Double, open_on: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _no_room(patch)
        with pytest.raises(ServingFailed, match="No space left") as caught:
            open_on(double)
    assert "PERSONALPEFT_VLLM_FOLDER" in caught.value.hint
    assert not double.known
    assert not list((tmp_path / "cache" / "served").iterdir())
    assert said(open_on(double), None)


def test_a_place_that_is_gone_is_said_to_those_who_need_it_and_ends_nobody_else(
    double: Double, open_on: Open, tmp_path: Path, tiny_base: Base
) -> None:
    backend = open_on(double)
    engine = Engine(backend, read_adapter=lambda digest: adapter(backend, 1))
    bare = Request(
        "ada", (Message("user", "hello"),), Stack(tiny_base.digest, ()), Sampling(max_tokens=4)
    )
    own = replace(bare, stack=Stack(tiny_base.digest, (StackEntry("style", "style@1", "12" * 32),)))
    try:
        before = engine.complete([bare])
        shutil.rmtree(tmp_path / "cache" / "served")
        with pytest.raises(ServingFailed) as caught:
            engine.complete([own])
        assert "PERSONALPEFT_VLLM_FOLDER" in caught.value.hint
        assert engine.metrics()["failures_total"] == 1
    finally:
        engine.close()
    assert before


def test_a_child_that_was_forked_takes_nothing_from_its_parent(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    (path,) = map(Path, double.known.values())
    child = os.fork()
    if child == 0:
        backend.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.is_dir()
    assert said(backend, None)


def test_an_engine_hears_the_servers_own_error(
    double: Double, open_on: Open, tiny_base: Base
) -> None:
    asked = Request(
        "ada", (Message("user", "hello"),), Stack(tiny_base.digest, ()), Sampling(max_tokens=4)
    )
    engine = Engine(
        open_on(double), read_adapter=lambda digest: pytest.fail("no adapter was asked for")
    )
    double.instead["/v1/completions"] = [(400, {"error": {"message": "max_tokens is too large"}})]
    try:
        with pytest.raises(ServingFailed, match="max_tokens is too large"):
            engine.complete([asked])
        assert engine.complete([asked])[0]
    finally:
        engine.close()


# What can be wrong with a server


def test_a_server_that_is_not_there_says_so_with_a_way_out(open_on: Open, tiny_base: Base) -> None:
    gone = Double(tiny_base)
    with doubled(gone):
        pass
    with pytest.raises(ServingFailed) as caught:
        open_on(gone)
    assert "PERSONALPEFT_VLLM_URL" in caught.value.hint


def test_a_token_is_sent_and_never_said(
    open_on: Open, tiny_base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with doubled(Double(tiny_base, token="s3cret")) as locked:
        for token in (None, "wr0ng"):
            with pytest.raises(ServingFailed, match="token") as caught:
                open_on(locked, token=token)
            assert "PERSONALPEFT_VLLM_TOKEN" in caught.value.hint
        backend = open_on(locked, token="s3cret")
        assert said(backend, None)
        backend.close()
    assert "s3cret" not in caplog.text
    assert "s3cret" not in backend.description


@pytest.mark.parametrize(
    ("wrong", "error", "way_out"),
    [
        (lambda d: setattr(d, "updates", False), ServingFailed, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (lambda d: setattr(d, "slots", 1), ServingFailed, "--max-loras"),
        (lambda d: d.bases.append("other"), InvalidInput, "PERSONALPEFT_VLLM_MODEL"),
        (lambda d: d.bases.clear(), InvalidInput, "PERSONALPEFT_VLLM_MODEL"),
        (lambda d: setattr(d, "logprob", -3.0), BaseMismatch, "--model"),
        (lambda d: setattr(d, "longest", 0), BaseMismatch, "--model"),
        (
            lambda d: d.instead.update({"/tokenize": [(200, {"tokens": [1, 2]})]}),
            BaseMismatch,
            "--model",
        ),
        (
            lambda d: d.instead.update({"/v1/models": [(200, "<html>")]}),
            ServingFailed,
            "PERSONALPEFT_VLLM_URL",
        ),
        (
            lambda d: d.instead.update(
                {"/v1/load_lora_adapter": [(400, {"error": {"message": "LoRA is not enabled"}})]}
            ),
            ServingFailed,
            "--enable-lora",
        ),
    ],
    ids=[
        "no updates",
        "one slot",
        "two bases",
        "no base",
        "other weights",
        "silent",
        "other tokenizer",
        "no vLLM",
        "no LoRA",
    ],
)
def test_a_server_that_will_not_do_is_refused_at_once_with_what_to_change(
    double: Double,
    open_on: Open,
    tmp_path: Path,
    wrong: Callable[[Double], None],
    error: type[PersonalPeftError],
    way_out: str,
) -> None:
    wrong(double)
    with pytest.raises(error) as caught:
        open_on(double)
    assert way_out in caught.value.hint
    assert not double.known
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_a_base_is_chosen_by_its_name(double: Double, open_on: Open) -> None:
    double.bases.append("other")
    assert "other" in open_on(double, model="other").description
    with pytest.raises(InvalidInput, match="othre") as caught:
        open_on(double, model="othre")
    assert "other" in caught.value.hint


def test_a_folder_that_the_server_does_not_see_says_how_to_let_it(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    with pytest.raises(ServingFailed) as caught:
        open_on(double, folder_there="/elsewhere")
    assert "PERSONALPEFT_VLLM_FOLDER_THERE" in caught.value.hint
    (tmp_path / "there").symlink_to(tmp_path / "here")
    backend = open_on(double, folder=tmp_path / "here", folder_there=str(tmp_path / "there"))
    assert all(path.startswith(str(tmp_path / "there")) for path in double.known.values())
    assert said(backend, None)


def test_a_certificate_is_trusted_where_it_is_named_and_not_else(
    open_on: Open, tiny_base: Base, tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    named = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(named))
    with doubled(Double(tiny_base), context) as secure:
        with pytest.raises(ServingFailed) as caught:
            open_on(secure, patience=0.0)
        assert "PERSONALPEFT_VLLM_CA" in caught.value.hint
        backend = open_on(secure, certificate=named)
        assert said(backend, None)
        backend.close()
    with pytest.raises(InvalidInput, match="certificate"):
        open_on(secure, certificate=tmp_path / "no.pem")


# Learning


def test_scores_are_torchs_own(double: Double, open_on: Open, torch_tiny: Backend) -> None:
    backend = open_on(double)
    stack = composed(backend, 1)
    item = Continuation(backend.encode("hello"), backend.encode(" there"))
    attach(backend, "one", stack)
    attach(torch_tiny, "as on vllm", stack)
    try:
        (ours,), (torchs,) = (
            backend.score([item], "one", kl=True),
            torch_tiny.score([item], "as on vllm", kl=True),
        )
    finally:
        torch_tiny.detach("as on vllm")
    assert ours.logp == pytest.approx(torchs.logp, abs=0.1)
    assert ours.kl == pytest.approx(torchs.kl, abs=0.1)


# Settings


def test_the_server_is_named_by_variables() -> None:
    def named(**said: str) -> Settings:
        return resolve("home", {f"PERSONALPEFT_VLLM_{name}": value for name, value in said.items()})

    assert named().vllm is None
    assert named(TOKEN="t").vllm is None
    assert named(URL="http://gpu:8000/v1/", RESOLVES="1", TIMEOUT="5").vllm == VllmServer(
        "http://gpu:8000", resolves=True, timeout=5.0
    )
    for wrong in (
        {"URL": "http://[::1"},
        {"URL": "http://gpu:abc"},
        {"URL": "http://gpu", "TOKEN": "k\u00e9y"},
        {"URL": "gpu:8000"},
        {"URL": "ftp://gpu"},
        {"URL": "http://a", "RESOLVES": "yes"},
        {"URL": "http://a", "TIMEOUT": "x"},
    ):
        with pytest.raises(InvalidInput, match=r"PERSONALPEFT_VLLM|address|token") as caught:
            named(**wrong)
        assert caught.value.hint


def test_a_written_row_is_a_whole_reply(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    (reply,) = written(backend, [row(backend, "hello", max_tokens=5, logprobs=True)])
    assert isinstance(reply, Written)
    assert (len(reply.tokens), reply.finish, reply.logprobs) == (5, "length", (-1.0,) * 5)
