"""Settings come from arguments, the environment and the platform's defaults, in this order."""

from pathlib import Path

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
