"""The vLLM backend survives failures of servers, networks and other programs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trustme
from backend_makers import (
    Batch,
    Output,
    attach,
    generate,
    in_thread,
    random_adapter,
    random_stack,
    row,
)
from vllm_double import (
    NO_LOAD,
    Open,
    VllmDouble,
    bare_request,
    cache_expected_tokens,
    generate_text,
    next_error,
    run_double,
    wait_until,
)

from personalpeft.adapters.formats.published import FILES, compute_digest, read_published_adapter
from personalpeft.backends.base import Backend, Continuation
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine
from personalpeft.errors import (
    BaseMismatch,
    InvalidInput,
    NotFound,
    PersonalPeftError,
    ServingFailed,
)
from personalpeft.settings import Settings, VllmServer, resolve
from personalpeft.types import Stack, StackEntry

pytestmark = pytest.mark.exhaustive

# Stacks and their names


def test_a_stack_is_registered_once_under_its_digest_from_a_verifiable_folder(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    attach(backend, "one", random_stack(backend, 1))
    names = [
        name for name in double.adapters if not name.startswith(backend._registry.bare_base.name)
    ]
    (name,) = names
    digest = name.split(":")[1]
    folder = Path(double.adapters[name])
    assert folder.name == digest
    assert compute_digest({file: (folder / file).read_bytes() for file in FILES}) == digest
    printed = subprocess.run(
        ["sha256sum", *FILES], cwd=folder, capture_output=True, check=True
    ).stdout
    whole = subprocess.run(["sha256sum"], input=printed, capture_output=True, check=True).stdout
    assert whole.decode().split()[0] == digest


def test_a_rank_without_server_support_is_padded(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    attach(backend, "odd", random_stack(backend, 1, rank=11))
    ranks = {json.loads(Path(path, FILES[0]).read_text())["r"] for path in double.adapters.values()}
    assert ranks == {8, 16}


def test_rows_without_a_stack_use_the_neutral_stack(double: VllmDouble, open_on: Open) -> None:
    """In a batch with other stacks vLLM would otherwise serve them with one of those."""
    backend = open_on(double)
    generate_text(backend, None)
    assert "base" not in {
        body["model"] for path, body in double.requests if path == "/v1/completions"
    }


def test_a_restarted_server_gets_its_stacks_again_without_a_visible_failure(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    before = generate_text(backend, "one"), generate_text(backend, None)
    double.restart()
    assert (generate_text(backend, "one"), generate_text(backend, None)) == before


def test_concurrent_rows_with_a_lost_stack_register_it_once(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double, rows=8)
    attach(backend, "one", random_stack(backend, 1))
    alone = generate_text(backend, "one")
    double.restart()
    # So slow that all of them find it lost before the first has registered it again.
    double.load_seconds = 0.3
    double.requests.clear()
    replies = generate(backend, [row(backend, "hello", "one") for _ in range(8)])
    assert {reply.text for reply in replies} == {alone}
    loads = [body["lora_name"] for path, body in double.requests if path == "/v1/load_lora_adapter"]
    assert (
        loads.count(backend._attached["one"].name)
        == loads.count(backend._registry.bare_base.name)
        == 1
    )


def no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_an_unwritable_cache_only_repeats_the_model_check(
    double: VllmDouble, open_on: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personalpeft.adapters.safe_io.tempfile.TemporaryDirectory", no_room)
    assert generate_text(open_on(double), None)


def test_a_dropped_stack_is_unloaded_only_after_its_last_row(
    double: VllmDouble, open_on: Open
) -> None:
    double.token_seconds = 0.05
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    (name,) = set(double.adapters) - {backend._registry.bare_base.name}
    folder = Path(double.adapters[name])
    writing = Batch(backend)
    reply = writing.join(row(backend, "hello", "one"))
    while len(reply.tokens) < 4:
        writing.step()
        assert name in double.adapters
        assert folder.is_dir()
    writing.finish()
    backend.detach("one")
    assert wait_until(lambda: name not in double.adapters and not folder.exists())


def test_a_key_attached_again_during_its_removal_is_available(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double)
    stack = random_stack(backend, 1)
    attach(backend, "one", stack)
    whole = generate_text(backend, "one")
    for _ in range(10):
        backend.detach("one")
        attach(backend, "one", stack)
    assert generate_text(backend, "one") == whole


def test_two_programs_on_one_server_keep_their_own_stacks(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    cache = tmp_path / "shared"
    one, two = (open_on(double, cache=cache) for _ in range(2))
    for backend in (one, two):
        attach(backend, "key", random_stack(backend, 1))
    whole = generate_text(one, "key")
    assert generate_text(two, "key") == whole
    one.close()
    assert generate_text(two, "key") == whole
    assert not any(name.endswith(one._registry._folders.process) for name in double.adapters)


def test_leftovers_of_a_killed_program_are_removed_when_the_next_one_opens(
    double: VllmDouble, open_on: Open, tmp_path: Path, tiny_base: Base
) -> None:
    cache = tmp_path / "cache"
    cache_expected_tokens(double, cache)
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from backend_makers import attach, random_stack
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.registry import find_card
from personalpeft.settings import VllmServer
base = resolve_base(find_card("tiny-random"), cache=Path({str(tiny_base.folder.parent.parent)!r}))
backend = VllmBackend(base, cache=Path({str(cache)!r}), server=VllmServer({double.url!r}), entropy=os.urandom)
attach(backend, "one", random_stack(backend, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    left = [Path(path) for path in double.adapters.values()]
    assert len(left) == 2
    assert all(path.is_dir() for path in left)

    backend = open_on(double, cache=cache)
    assert set(double.adapters) == {backend._registry.bare_base.name}
    assert not any(path.exists() for path in left)
    assert sorted(path.name for path in (cache / "served").iterdir()) == [
        backend._registry._folders.process,
        f"{backend._registry._folders.process}.lock",
    ]


def test_closing_leaves_nothing_on_the_server_and_on_disk(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    backend.close()
    backend.close()
    assert not double.adapters
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_stacks_never_exceed_the_servers_slots(tiny_base: Base, open_on: Open) -> None:
    with run_double(VllmDouble(tiny_base, slots=3)) as small:
        backend = open_on(small, slots=32)
        assert backend.slots == 2
        backend.close()
    with (
        run_double(VllmDouble(tiny_base, slots=1)) as tiny,
        pytest.raises(ServingFailed) as caught,
    ):
        open_on(tiny)
    assert "--max-loras" in caught.value.hint


def test_servers_with_a_resolver_get_no_load_requests(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    place = tmp_path / "shared"
    double.resolver, double.updates = place, False
    backend = open_on(double, folder=place, resolves=True)
    attach(backend, "one", random_stack(backend, 1))
    whole = generate_text(backend, "one")
    assert double.request_count("/v1/load_lora_adapter") == 0
    (digest,) = (
        path.name
        for path in place.glob("*/*")
        if path.name != backend._registry.bare_base.folder.digest
    )
    assert read_published_adapter(place, digest, FILES[1])
    for strange in ("../" + digest, digest.upper(), "0" * 64):
        with pytest.raises(NotFound):
            read_published_adapter(place, strange, FILES[1])
    # Another program deleted it from the shared folder: it is published again.
    backend._registry._folders.remove(digest)
    assert generate_text(backend, "one") == whole


# Rows


def test_a_broken_connection_ends_only_its_row(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    for seed, key in enumerate(("one", "two")):
        attach(backend, key, random_stack(backend, seed))
    whole = generate_text(backend, "two")
    double.cut_off.append(
        next(name for name in double.adapters if backend._attached["one"].name == name)
    )
    engine_rows = [backend.admit(row(backend, "hello", key)) for key in ("one", "two")]
    text, error = "", None
    while text != whole or error is None:
        for piece in backend.step():
            if piece.error is not None:
                assert piece.index == engine_rows[0]
                error = piece.error
                backend.remove(piece.index)
            elif piece.index == engine_rows[1]:
                text += piece.text
    assert isinstance(error, ServingFailed)
    assert backend.occupancy().num_sequences == 0


def test_a_reply_without_a_finish_reason_has_failed(double: VllmDouble, open_on: Open) -> None:
    """A partial reply must not count as complete: a learn would judge by it."""
    backend = open_on(double)
    for finish in ("abort", "error", None):
        double.finish = finish
        number = backend.admit(row(backend, "hello", max_tokens=40))
        assert number is not None
        assert isinstance(next_error(backend), ServingFailed)
        backend.remove(number)


def test_an_error_within_a_reply_is_not_retried(double: VllmDouble, open_on: Open) -> None:
    """A retry would repeat the text that was already streamed."""
    backend = open_on(double)
    double.late_error = "The model does not exist."
    with pytest.raises(ServingFailed):
        generate(backend, [row(backend, "hello", max_tokens=8)])


def test_a_published_folder_outlives_its_dropped_row(double: VllmDouble, open_on: Open) -> None:
    """A server that misses the folder of a queued row exits."""
    double.token_seconds = 0.05
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    (name,) = set(double.adapters) - {backend._registry.bare_base.name}
    folder = Path(double.adapters[name])
    number = backend.admit(row(backend, "hello", "one", max_tokens=30))
    assert number is not None
    backend.remove(number)
    backend.detach("one")
    time.sleep(0.5)
    assert folder.is_dir()
    assert wait_until(lambda: not folder.exists())


def test_published_folders_are_readable_by_those_who_can_read_their_parent(
    double: VllmDouble, open_on: Open, tmp_path: Path
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


def test_a_removed_row_closes_its_connection(double: VllmDouble, open_on: Open) -> None:
    double.token_seconds = 0.05
    backend = open_on(double)
    number = backend.admit(row(backend, "hello", max_tokens=32))
    assert number is not None
    while not backend.step():
        pass
    backend.remove(number)
    assert double.dropped.wait(10)


def test_prompts_are_sent_as_tokens_and_cached_per_owner(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    double.requests.clear()
    generate(backend, [row(backend, "hello", owner=owner) for owner in ("zora", "zora", "bo")])
    backend.clear_cache()
    generate(backend, [row(backend, "hello", owner="zora")])
    bodies = [body for path, body in double.requests if path == "/v1/completions"]
    assert all(body["prompt"] == list(row(backend, "hello").prompt_tokens) for body in bodies)
    assert [
        len({body["cache_salt"] for body in bodies[:3]}),
        len({body["cache_salt"] for body in bodies}),
    ] == [2, 3]
    assert "zora" not in json.dumps(bodies)


def test_a_slow_load_delays_no_other_reply(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    double.load_seconds = 1.0
    loading = in_thread(attach, backend, "one", random_stack(backend, 1))
    began = time.monotonic()
    assert generate_text(backend, None)
    assert time.monotonic() - began < 1.0
    loading.result()
    assert generate_text(backend, "one")


def test_a_failed_load_occupies_no_slot_and_names_the_missing_option(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double, slots=1)
    double.overrides["/v1/load_lora_adapter"] = [(500, NO_LOAD)]
    with pytest.raises(ServingFailed, match="rank") as caught:
        attach(backend, "one", random_stack(backend, 1))
    assert "--max-lora-rank" in caught.value.hint
    attach(backend, "one", random_stack(backend, 1))
    assert generate_text(backend, "one")


def test_a_briefly_busy_server_is_retried(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    double.overrides["/v1/load_lora_adapter"] = [(503, "starting"), (429, "full")]
    attach(backend, "one", random_stack(backend, 1))
    double.overrides["/v1/completions"] = [(503, "starting"), (429, "full")]
    assert generate_text(backend, "one")


def test_the_timeout_bounds_all_retries_together(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double, timeout=0.5, retry_seconds=1.0)
    double.load_seconds = 2.0
    began = time.monotonic()
    with pytest.raises(ServingFailed):
        attach(backend, "one", random_stack(backend, 1))
    assert time.monotonic() - began < 8


def test_a_malformed_chunk_ends_only_its_row(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    double.forced_token = -1
    number = backend.admit(row(backend, "hello"))
    assert number is not None
    assert isinstance(next_error(backend), ServingFailed)
    backend.remove(number)
    double.forced_token = 0
    assert generate_text(backend, None)


def test_requests_set_every_sampling_option_explicitly(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    generate_text(backend, None)
    body = double.requests[-1][1]
    assert (body["repetition_penalty"], body["top_k"], body["min_p"]) == (1.0, 0, 0.0)


def test_a_limit_of_likely_tokens_reaches_the_server(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    generate(backend, [row(backend, "hello", temperature=0.8, top_k=7)])
    assert double.requests[-1][1]["top_k"] == 7


def test_sequential_replies_share_a_connection_and_none_is_cancelled(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double)
    stack = random_stack(backend, 1)
    attach(backend, "one", stack)
    generate_text(backend, "one")
    before = double.connections
    for _ in range(5):
        generate_text(backend, "one", max_tokens=3)
    assert double.connections - before <= 1
    began = time.monotonic()
    backend.detach("one")
    attach(backend, "one", stack)
    assert time.monotonic() - began < 1.5


def test_closing_right_after_detaching_leaves_no_name(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double, slots=5)
    for seed in range(5):
        attach(backend, f"s{seed}", random_stack(backend, seed))
    number = backend.admit(row(backend, "hello", "s0"))
    assert number is not None
    backend.remove(number)
    for seed in range(5):
        backend.detach(f"s{seed}")
    backend.close()
    assert not double.adapters
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_a_name_that_could_not_be_unloaded_keeps_its_folder_for_the_next_program(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    double.overrides["/v1/unload_lora_adapter"] = [(500, "busy")]
    backend.close()
    assert [Path(path).is_dir() for path in double.adapters.values()] == [True]
    later = open_on(double, cache=tmp_path / "cache")
    assert set(double.adapters) == {later._registry.bare_base.name}


def test_an_unresponsive_server_is_not_taken_for_a_stopped_one(
    double: VllmDouble, open_on: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still has the names, and may read their folders."""
    monkeypatch.setattr("personalpeft.backends.vllm.transport.CONNECT_SECONDS", 0.5)
    double.closes_connections = True
    backend = open_on(double)
    with double.busy():
        began = time.monotonic()
        with pytest.raises(ServingFailed, match=r"within 0\.5 s"):
            generate_text(backend, None)
        assert time.monotonic() - began < 8
        backend.close()
    assert [Path(path).is_dir() for path in double.adapters.values()] == [True]


def test_a_stopped_server_keeps_no_folder(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    with run_double(VllmDouble(double.base)) as leaving:
        leaving.closes_connections = True
        backend = open_on(leaving)
    backend.close()
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_a_full_disk_is_reported_with_a_hint_when_a_home_is_opened(
    double: VllmDouble, open_on: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("personalpeft.adapters.formats.published.tempfile.mkdtemp", no_room)
        with pytest.raises(ServingFailed, match="No space left") as caught:
            open_on(double)
    assert "PERSONALPEFT_VLLM_FOLDER" in caught.value.hint
    assert not double.adapters
    assert not list((tmp_path / "cache" / "served").iterdir())
    assert generate_text(open_on(double), None)


def test_a_deleted_folder_fails_only_the_requests_that_need_it(
    double: VllmDouble, open_on: Open, tmp_path: Path, tiny_base: Base
) -> None:
    backend = open_on(double)
    engine = Engine(backend, read_adapter=lambda digest: random_adapter(backend, 1))
    bare = bare_request(tiny_base)
    with_stack = replace(
        bare, stack=Stack(tiny_base.digest, (StackEntry("style", "style@1", "12" * 32),))
    )
    try:
        before = engine.complete([bare])
        shutil.rmtree(tmp_path / "cache" / "served")
        with pytest.raises(ServingFailed) as caught:
            engine.complete([with_stack])
        assert "PERSONALPEFT_VLLM_FOLDER" in caught.value.hint
        assert engine.metrics()["failures_total"] == 1
    finally:
        engine.close()
    assert before


def test_a_forked_child_takes_nothing_from_its_parent(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    (path,) = map(Path, double.adapters.values())
    child = os.fork()
    if child == 0:
        backend.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.is_dir()
    assert generate_text(backend, None)


def test_the_engine_reports_the_servers_own_error(
    double: VllmDouble, open_on: Open, tiny_base: Base
) -> None:
    request = bare_request(tiny_base)
    engine = Engine(
        open_on(double), read_adapter=lambda digest: pytest.fail("no adapter was asked for")
    )
    double.overrides["/v1/completions"] = [(400, {"error": {"message": "max_tokens is too large"}})]
    try:
        with pytest.raises(ServingFailed, match="max_tokens is too large"):
            engine.complete([request])
        assert engine.complete([request])[0]
    finally:
        engine.close()


# Unusable servers


def test_an_unreachable_server_is_an_error_with_a_hint(open_on: Open, tiny_base: Base) -> None:
    gone = VllmDouble(tiny_base)
    with run_double(gone):
        pass
    with pytest.raises(ServingFailed) as caught:
        open_on(gone)
    assert "PERSONALPEFT_VLLM_URL" in caught.value.hint


def test_a_token_is_sent_and_never_logged(
    open_on: Open, tiny_base: Base, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with run_double(VllmDouble(tiny_base, token="s3cret")) as locked:
        for token in (None, "wr0ng"):
            with pytest.raises(ServingFailed, match="token") as caught:
                open_on(locked, token=token)
            assert "PERSONALPEFT_VLLM_TOKEN" in caught.value.hint
        backend = open_on(locked, token="s3cret")
        assert generate_text(backend, None)
        backend.close()
    assert "s3cret" not in caplog.text
    assert "s3cret" not in backend.description


@pytest.mark.parametrize(
    ("break_server", "error", "way_out"),
    [
        (lambda d: setattr(d, "updates", False), ServingFailed, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (lambda d: setattr(d, "slots", 1), ServingFailed, "--max-loras"),
        (lambda d: d.bases.append("other"), InvalidInput, "PERSONALPEFT_VLLM_MODEL"),
        (lambda d: d.bases.clear(), InvalidInput, "PERSONALPEFT_VLLM_MODEL"),
        (lambda d: setattr(d, "logprob", -3.0), BaseMismatch, "base's folder"),
        (lambda d: setattr(d, "longest", 0), BaseMismatch, "base's folder"),
        (
            lambda d: d.overrides.update({"/tokenize": [(200, {"tokens": [1, 2]})]}),
            BaseMismatch,
            "base's folder",
        ),
        (
            lambda d: d.overrides.update({"/v1/models": [(200, "<html>")]}),
            ServingFailed,
            "PERSONALPEFT_VLLM_URL",
        ),
        (
            lambda d: d.overrides.update(
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
def test_an_unsuitable_server_is_refused_at_once_with_a_hint(
    double: VllmDouble,
    open_on: Open,
    tmp_path: Path,
    break_server: Callable[[VllmDouble], None],
    error: type[PersonalPeftError],
    way_out: str,
) -> None:
    break_server(double)
    with pytest.raises(error) as caught:
        open_on(double)
    assert way_out in caught.value.hint
    assert not double.adapters
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_a_base_is_chosen_by_its_name(double: VllmDouble, open_on: Open) -> None:
    double.bases.append("other")
    assert "other" in open_on(double, model="other").description
    with pytest.raises(InvalidInput, match="othre") as caught:
        open_on(double, model="othre")
    assert "other" in caught.value.hint


def test_a_folder_that_the_server_cannot_see_gives_a_hint(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    with pytest.raises(ServingFailed) as caught:
        open_on(double, folder_there="/elsewhere")
    assert "PERSONALPEFT_VLLM_FOLDER_THERE" in caught.value.hint
    (tmp_path / "there").symlink_to(tmp_path / "here")
    backend = open_on(double, folder=tmp_path / "here", folder_there=str(tmp_path / "there"))
    assert all(path.startswith(str(tmp_path / "there")) for path in double.adapters.values())
    assert generate_text(backend, None)


def test_a_certificate_is_trusted_only_where_configured(
    open_on: Open, tiny_base: Base, tmp_path: Path
) -> None:
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    named = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(named))
    with run_double(VllmDouble(tiny_base), context) as secure:
        with pytest.raises(ServingFailed) as caught:
            open_on(secure, retry_seconds=0.0)
        assert "PERSONALPEFT_VLLM_CA" in caught.value.hint
        backend = open_on(secure, certificate=named)
        assert generate_text(backend, None)
        backend.close()
    with pytest.raises(InvalidInput, match="certificate"):
        open_on(secure, certificate=tmp_path / "no.pem")


# Scores


def test_scores_are_torchs(double: VllmDouble, open_on: Open, torch_tiny: Backend) -> None:
    backend = open_on(double)
    stack = random_stack(backend, 1)
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


def test_environment_variables_name_the_server() -> None:
    def named(**variables: str) -> Settings:
        return resolve(
            "home", {f"PERSONALPEFT_VLLM_{name}": value for name, value in variables.items()}
        )

    assert named().vllm is None
    assert named(TOKEN="t").vllm is None
    assert named(URL="http://gpu:8000/v1/", RESOLVES="1", TIMEOUT="5").vllm == VllmServer(
        "http://gpu:8000", resolves=True, timeout=5.0
    )
    for break_server in (
        {"URL": "http://[::1"},
        {"URL": "http://gpu:abc"},
        {"URL": "http://gpu", "TOKEN": "k\u00e9y"},
        {"URL": "gpu:8000"},
        {"URL": "ftp://gpu"},
        {"URL": "http://a", "RESOLVES": "yes"},
        {"URL": "http://a", "TIMEOUT": "x"},
    ):
        with pytest.raises(InvalidInput, match=r"PERSONALPEFT_VLLM|address|token") as caught:
            named(**break_server)
        assert caught.value.hint


def test_a_generated_row_is_a_complete_reply(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    (reply,) = generate(backend, [row(backend, "hello", max_tokens=5, logprobs=True)])
    assert isinstance(reply, Output)
    assert (len(reply.tokens), reply.finish, reply.logprobs) == (5, "length", (-1.0,) * 5)
