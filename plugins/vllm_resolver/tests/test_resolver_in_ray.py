"""The Ray Serve LLM example: two vLLM replicas, each of which pulls the requested stacks.

Requests return to the replica that has their stack. Needs a Python with vLLM and Ray: the one in
``PERSONALPEFT_BENCH_VLLM``, or of ``make vllm-env``. Takes two minutes or more.
"""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from resolver_makers import (
    PLUGIN,
    PYTHON,
    card_for_vllm,
    random_stack,
    request_completion,
    write_stack,
)
from s3_maker import BUCKET, copy_to, has_s3, s3_server

import personalpeft
from benchmarks.fleet import Fleet, fleets
from personalpeft import Runtime
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base

EXAMPLE = PLUGIN / "examples" / "ray_serve_llm.yaml"
PEOPLE = 6

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not (list(PYTHON.parents[1].glob("lib/python*/site-packages/ray/serve")) and has_s3()),
        reason="there is no vLLM with Ray and object storage here; make vllm-env makes an environment for them",
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def base(place: Path) -> Base:
    return resolve_base(find_card(card_for_vllm(place)), cache=place / "personalpeft-cache")


@pytest.fixture(scope="module")
def storage(place: Path) -> Iterator[dict[str, str]]:
    """Empty object storage, as its environment variables."""
    with s3_server(place / "s3.log") as environment:
        yield environment


@pytest.fixture(scope="module")
def fleet(base: Base, place: Path, storage: dict[str, str]) -> Iterator[Fleet]:
    """Two replicas behind one address."""
    environment = {
        "PERSONALPEFT_RESOLVER_BUCKET": f"s3://{BUCKET}/fleet",
        **storage,
        "PYTHONPATH": str(PLUGIN),
    }
    with fleets(
        PYTHON,
        EXAMPLE,
        base.folder,
        place,
        replicas=[2],
        dtype="float32",
        environment=environment,
        echo=print,
    ) as (two,):
        yield two


@pytest.fixture
def runtime(
    fleet: Fleet, base: Base, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Runtime]:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place / "personalpeft-cache"))
    monkeypatch.setenv("PERSONALPEFT_VLLM_URL", fleet.url)
    monkeypatch.setenv("PERSONALPEFT_VLLM_RESOLVES", "1")
    monkeypatch.setenv("PERSONALPEFT_VLLM_FOLDER", str(fleet.stacks))
    with personalpeft.open(tmp_path / "home", base=card_for_vllm(place), backend="vllm") as opened:
        yield opened


def reply_in_rounds(fleet: Fleet, names: set[str], ask_all: Callable[[], list[str]]) -> list[str]:
    """Request these stacks until each replica that has one is requested again; return the replies."""
    replies = ask_all()
    # Replicas report their stacks to the router at intervals.
    time.sleep(3)
    pulled = [part & names for part in fleet.pulled()]
    assert [ask_all() for _ in range(3)] == 3 * [replies]
    assert [part & names for part in fleet.pulled()] == pulled
    one, other = pulled
    assert not one & other
    assert one | other == names
    return replies


@pytest.mark.timeout(900)
def test_each_replica_pulls_requested_stacks_and_gets_their_next_requests(
    runtime: Runtime, fleet: Fleet, base: Base, tmp_path: Path
) -> None:
    people = [runtime.user(f"user-{number}") for number in range(PEOPLE)]
    bare = people[0].chat("How do I boil an egg?", temperature=0, max_tokens=8).text
    for number, person in enumerate(people):
        person.import_peft(
            write_stack(random_stack(base, number), tmp_path / person.id), layer="style"
        )
    done = runtime.publish(to=tmp_path / "published")

    def ask_all() -> list[str]:
        return [
            person.chat("How do I boil an egg?", temperature=0, max_tokens=8).text
            for person in people
        ]

    # A home's own server and its publication give a stack the same name.
    replies = reply_in_rounds(fleet, {path.name for path in done.folder.iterdir()}, ask_all)
    assert len({bare, *replies}) == PEOPLE + 1


@pytest.mark.timeout(900)
def test_a_stack_published_into_object_storage_is_pulled_by_name(
    fleet: Fleet,
    base: Base,
    place: Path,
    tmp_path: Path,
    storage: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place / "personalpeft-cache"))
    # No server runs for these users, and no model is loaded for them.
    with personalpeft.open(tmp_path / "home", base=card_for_vllm(place)) as home:
        for number in range(PEOPLE):
            made = write_stack(random_stack(base, 100 + number), tmp_path / f"{number}")
            home.user(f"user-{number}").import_peft(made, layer="style")
        done = home.publish(to=tmp_path / "published")
    names = [each.name for each in done.stacks if each.name]

    def ask_all() -> list[str]:
        return [request_completion(fleet.url, name) for name in names]

    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask_all()
    copy_to(storage, "fleet", done.folder)
    replies = reply_in_rounds(fleet, {path.name for path in done.folder.iterdir()}, ask_all)
    assert len(set(replies)) == PEOPLE


@pytest.mark.timeout(900)
def test_users_who_learned_on_another_machine_are_served_by_name(
    fleet: Fleet,
    base: Base,
    place: Path,
    tmp_path: Path,
    storage: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place / "personalpeft-cache"))
    card, users = card_for_vllm(place), [f"learner-{number}" for number in range(PEOPLE // 2)]
    with (
        personalpeft.open(tmp_path / "home", card, "torch") as home,
        personalpeft.open(tmp_path / "node", card, "torch") as node,
    ):
        for user in users:
            for number in range(4):
                home.user(user).teach(f"question {number}", f"Ahoy! {number} of {user}")
            # A base of random weights answers nothing right, so the gate has nothing to go by.
            (result,) = node.learn_bundles([home.user(user).bundle_learn(accept=True)])
            assert home.user(user).apply_learn(result).live
        done = home.publish(to=tmp_path / "published")
    names = [each.name for each in done.stacks if each.name]
    assert len(names) == len(users)
    copy_to(storage, "fleet", done.folder)

    def ask_all() -> list[str]:
        return [request_completion(fleet.url, name) for name in names]

    reply_in_rounds(fleet, {path.name for path in done.folder.iterdir()}, ask_all)


def test_concurrent_first_requests_for_a_stack_are_all_answered(
    fleet: Fleet, runtime: Runtime, base: Base, tmp_path: Path
) -> None:
    ada = runtime.user("ada")
    ada.import_peft(write_stack(random_stack(base, 200), tmp_path / "ada"), layer="style")

    def ask(_: int) -> str:
        return ada.chat("How do I boil an egg?", temperature=0, max_tokens=8).text

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1


def test_an_unknown_stack_is_not_found(fleet: Fleet) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        request_completion(fleet.url, f"personalpeft:{'0' * 64}")
    assert refused.value.code == 404
    assert b"does not exist" in refused.value.read()
