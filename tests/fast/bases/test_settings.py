from pathlib import Path

from personalpeft.settings import resolve


def test_what_was_asked_for_wins_over_the_environment(tmp_path: Path) -> None:
    environ = {"PERSONALPEFT_HOME": "/elsewhere", "PERSONALPEFT_CACHE": str(tmp_path / "cache")}
    settings = resolve(tmp_path, environ)
    assert settings.home == tmp_path
    assert settings.cache == tmp_path / "cache"


def test_the_environment_wins_over_the_platform(tmp_path: Path) -> None:
    assert resolve(None, {"PERSONALPEFT_HOME": str(tmp_path)}).home == tmp_path


def test_without_a_word_the_platforms_folders_are_used_and_not_made() -> None:
    settings = resolve(None, {"PERSONALPEFT_HOME": ""})
    assert settings.home.is_absolute()
    assert settings.cache.is_absolute()
    assert settings.home != settings.cache
    assert "personalpeft" in settings.home.parts
