"""Settings come from arguments, the environment and the platform's defaults, in this order."""

import os
from pathlib import Path

import pytest

import personalpeft
from personalpeft import HomeError
from personalpeft.settings import resolve


def test_argument_overrides_the_environment(tmp_path: Path) -> None:
    environ = {"PERSONALPEFT_HOME": "/elsewhere", "PERSONALPEFT_CACHE": str(tmp_path / "cache")}
    settings = resolve(tmp_path, environ)
    assert settings.home == tmp_path
    assert settings.cache == tmp_path / "cache"


def test_environment_overrides_the_platform(tmp_path: Path) -> None:
    assert resolve(None, {"PERSONALPEFT_HOME": str(tmp_path)}).home == tmp_path


def test_platform_folders_are_the_default_and_are_not_created() -> None:
    settings = resolve(None, {"PERSONALPEFT_HOME": ""})
    assert settings.home.is_absolute()
    assert settings.cache.is_absolute()
    assert settings.home != settings.cache
    assert "personalpeft" in settings.home.parts


@pytest.mark.skipif(os.name == "nt", reason="Windows knows the folders of all accounts")
def test_the_home_of_an_unknown_account_is_refused_by_name() -> None:
    with pytest.raises(HomeError, match="home directory") as raised:
        personalpeft.open("~no-such-account/personal")
    assert ".." not in raised.value.message


def test_an_account_without_a_home_folder_needs_full_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwd = pytest.importorskip("pwd")

    def no_entry(uid: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    for variable in [each for each in os.environ if each == "HOME" or each.startswith("XDG_")]:
        monkeypatch.delenv(variable)
    with pytest.raises(HomeError, match="home directory") as raised:
        resolve(tmp_path, {})
    for variable in ("HOME", "PERSONALPEFT_HOME", "PERSONALPEFT_CACHE", "PERSONALPEFT_KEYS"):
        assert variable in raised.value.hint
    named = {"PERSONALPEFT_CACHE": str(tmp_path), "PERSONALPEFT_KEYS": str(tmp_path)}
    assert resolve(tmp_path, named).home == tmp_path


def test_the_former_name_of_the_seconds_of_retries_works_for_one_release(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8000"
    environ = {"PERSONALPEFT_VLLM_URL": url, "PERSONALPEFT_VLLM_PATIENCE": "3"}
    with pytest.warns(DeprecationWarning, match="RETRY_SECONDS"):
        settings = resolve(tmp_path, environ)
    with pytest.warns(DeprecationWarning, match="retry_seconds"):
        assert settings.vllm == personalpeft.VllmServer(url, patience=3)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="retry_seconds"):
        assert settings.vllm.patience == 3  # type: ignore[union-attr]
    with (
        pytest.warns(DeprecationWarning, match="RETRY_SECONDS"),
        pytest.raises(personalpeft.InvalidInput, match="VLLM_PATIENCE must be a number"),
    ):
        resolve(tmp_path, {**environ, "PERSONALPEFT_VLLM_PATIENCE": "soon"})
