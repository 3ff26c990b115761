import pytest
from pydantic import ValidationError

from ft_service.data import image_limits
from ft_service.data.image_limits import BYTES, IMAGES, most_bytes, most_images
from ft_service.host.environment import SERVICE
from ft_service.settings import Settings


def test_the_operator_s_limits_are_those_of_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Settings()
    assert (most_bytes(), most_images()) == (usual.image_bytes, usual.line_images) == (10485760, 10)
    monkeypatch.setenv(BYTES, "2048")
    monkeypatch.setenv(IMAGES, "64")
    own = Settings()
    assert (most_bytes(), most_images()) == (own.image_bytes, own.line_images) == (2048, 64)
    assert set(image_limits.NAMES) <= set(SERVICE), "children have them too"


@pytest.mark.parametrize(
    ("name", "value", "held"),
    [(IMAGES, "65", 64), (IMAGES, "0", 10), (BYTES, str(2**40), 64 * 2**20), (BYTES, "many", None)],
)
def test_settings_refuse_what_is_beyond(
    name: str, value: str, held: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=name.removeprefix("FT_").lower()):
        Settings()
    found = most_bytes() if name == BYTES else most_images()
    assert found == (held or image_limits.USUAL_BYTES)
