"""Options of a chat: logprobs, stop strings, an older revision, and prompts without the template."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime

from personalpeft import InvalidInput, NotFound, QueueFull, Serving
from personalpeft.backends.fake import fake_base


def test_logprobs_cover_each_token_of_the_reply(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        reply = ask(ada, logprobs=True)
        assert "".join(token.text for token in reply.logprobs) == reply.text
        assert len(reply.logprobs) == reply.usage.completion_tokens
        assert all(token.logprob < 0 for token in reply.logprobs)
        assert ask(ada).logprobs == ()


def test_stream_yields_logprobs_with_its_tokens(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        stream = runtime.user("ada").stream("hello", temperature=0, logprobs=True)
        next(stream)
        assert len(stream.logprobs) == 1
        for _ in stream:
            pass
        assert stream.logprobs == stream.reply.logprobs


def test_reply_names_the_stop_string_that_ended_it(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        words = ask(ada).text.split()
        reply = ask(ada, stop=["never said", words[2]])
        assert (reply.stop, reply.finish_reason) == (words[2], "stop")
        assert reply.text.split() == words[:2]
        assert ask(ada).stop == ""


def test_older_revision_answers_as_before(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        first = ada.learn()
        then = ask(ada, "hello")
        correct(ada, first=6)
        second = ada.learn(accept=True)
        assert first.revision is not None
        assert second.revision is not None
        assert ask(ada, "hello").stack != then.stack
        older = ask(ada, "hello", revision=first.revision)
        assert (older.text, older.stack) == (then.text, then.stack)
        # Naming a revision attaches it even where its layer's scope is "never".
        ada.scope("style", "never")
        assert ask(ada, "hello", revision=first.revision).text == then.text
        with pytest.raises(NotFound):
            ask(ada, revision="style@000000000000")
        with pytest.raises(InvalidInput):
            ask(ada, revision=first.revision, layers=[])


def test_prompt_without_the_template_is_read_verbatim(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        ada.remember("My dog is called Biscuit.")
        plain = ask(ada, "What is my dog called?", template=False)
        assert plain.usage.prompt_tokens == len("What is my dog called?")
        assert ada.turn(plain).used == ()
        with pytest.raises(InvalidInput):
            ada.chat([{"role": "user", "content": "hello"}], template=False)


def test_begun_streams_run_side_by_side(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        ada = runtime.user("ada")
        streams = [ada.stream("hello", temperature=1, seed=seed) for seed in range(4)]
        for stream in streams:
            stream.begin()
        texts = ["".join(stream) for stream in reversed(streams)]
        assert texts == [
            ada.chat("hello", temperature=1, seed=seed).text for seed in reversed(range(4))
        ]


def test_full_queue_refuses_a_stream_before_it_begins(tmp_path: Path) -> None:
    held = threading.Event()
    with open_runtime(tmp_path, serving=Serving(max_batch=1, max_queue=1)) as runtime:
        ada = runtime.user("ada")
        # The engine calls this before it admits a row, and waits for its return.
        first, second = (ada.stream("hello", cancelled=lambda: not held.wait(20)) for _ in range(2))
        first.begin()
        with pytest.raises(QueueFull) as refused:
            second.begin()
        held.set()
        assert refused.value.retry_after
        assert "".join(first)
        # A stream of which no part was read leaves no turn.
        assert len(ada.turns()) == 1


def test_texts_that_share_words_are_similar(tmp_path: Path) -> None:
    with open_runtime(tmp_path) as runtime:
        found = runtime.embed(["the dog barks", "a dog barks", "sum of squares"])
        near, far = found.vectors[0] @ found.vectors[1], found.vectors[0] @ found.vectors[2]
        assert near > far
        assert found.tokens == 9
        with pytest.raises(InvalidInput):
            runtime.embed([])
        with pytest.raises(InvalidInput):
            runtime.embed("one text")


def test_settings_of_the_card_that_a_chat_cannot_set_are_used(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = fake_base()
    card = replace(base.card, sampling=replace(base.card.sampling, top_k=7))
    monkeypatch.setattr("personalpeft.backends.fake.fake_base", lambda: replace(base, card=card))
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        ada.chat("Hello", temperature=0.5)
        assert ada.turn("last").sampling.top_k == 7
