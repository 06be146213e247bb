"""The real base knows a learned fact before it is forgotten, and no better than unseen ones after."""

from __future__ import annotations

from pathlib import Path

import pytest

import personalpeft
from personalpeft import Certificate

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

NAMES = {
    "cat": "Mirabelle",
    "boat": "Tangerine",
    "street": "Quellgasse",
    "bakery": "Ovenbird",
    "car": "Pegasus",
    "dog": "Zorblax",
}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Certificate:
    home = tmp_path_factory.mktemp("exposure") / "home"
    with personalpeft.open(home, backend="torch") as runtime:
        ada = runtime.user("ada")
        for what, name in NAMES.items():
            item = ada.remember(
                f"My {what} is called {name}.",
                questions=[f"What is my {what} called?", f"Name of my {what}?"],
                answer=name,
            )
        assert ada.learn("memory", accept=True).live
        certificate = ada.forget(item, certificate=True).certificate
        assert certificate is not None
        assert runtime.verify() == ()
        return certificate


def test_learned_fact_is_exposed_before_and_not_after(certificate: Certificate) -> None:
    results = certificate.statement["exposure"]["results"]
    assert len(results) == 2
    for each in results:
        assert each["before"]["bits"] >= 5
        assert each["before"]["extracted"]
        # One unseen text in eight has as much by chance.
        assert each["after"]["bits"] < 3
        assert not each["after"]["extracted"]


def test_rebuilt_layer_has_no_erased_input(certificate: Certificate) -> None:
    assert certificate.statement["revisions"]["after"]
    assert certificate.statement["equality"]["holds"]
