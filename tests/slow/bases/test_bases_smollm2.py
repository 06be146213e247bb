"""The default base has the documented digest, system message and tokens."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base
from personalpeft.types import Message

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(shared_cache: Path) -> Base:
    return resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache)


def test_default_base_has_the_documented_digest(smollm2: Base) -> None:
    assert smollm2.digest == "0706508eb4b6e3a7dcb97b1f2d762137e538f20b5403dfd56a022774ce2eb6c8"
    assert (smollm2.architecture.blocks, len(smollm2.architecture.projections)) == (30, 7)
    assert smollm2.stop_tokens[0] == "<|im_end|>"


def test_resolving_it_again_finds_the_same(
    smollm2: Base, shared_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache) == smollm2
    assert capfd.readouterr() == ("", "")


def test_cards_system_message_is_that_of_the_template(smollm2: Base) -> None:
    text = render_chat(smollm2, [Message("user", "Hi")])
    assert text.count("You are a helpful AI assistant named SmolLM, trained by Hugging Face") == 1
    assert text.startswith("<|im_start|>system\n")


def test_numbers_and_spaces_become_the_tokens_of_the_models_training(
    smollm2: Base,
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2.folder / "tokenizer.json"))
    assert tokenizer.encode("x=  42", add_special_tokens=False).ids == [104, 45, 256, 36, 34]
    assert tokenizer.encode("a  1", add_special_tokens=False).ids == [81, 256, 33]
