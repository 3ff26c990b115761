"""The chat template in a base's folder, as text."""

from __future__ import annotations

from pathlib import Path

from ft_service.bases.base_files import document_or_none
from ft_service.errors import SpecError
from ft_service.spec import JobRequest
from ft_service.spec.template_variables import with_variables
from ft_service.spec.templates import named_template

_FILE = "chat_template.jinja"
_MOST_BYTES = 1024**2
_PARAM = "chat_template_kwargs"


def own_template(folder: Path) -> str | None:
    """The base's own chat template, from where tokenizers read it first.

    None: it has none, or several. Raises OSError.
    """
    if any((folder / "additional_chat_templates").glob("*.jinja")):
        return None
    if (folder / _FILE).is_file():
        with (folder / _FILE).open("rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    documents = (
        document_or_none(folder / name) or {}
        for name in ("tokenizer_config.json", "chat_template.json")
    )
    given = next(
        (document["chat_template"] for document in documents if document.get("chat_template")), None
    )
    return given if isinstance(given, str) else None


def with_template_variables(request: JobRequest, folder: Path) -> JobRequest:
    """The request, whose chat template sets the variables that it gives (`chat_template_kwargs`).

    `folder`: of the base. Raises SpecError for a base without a chat template of its own, or with
    several.
    """
    if not request.chat_template_kwargs:
        return request
    try:
        template = (
            named_template(request.chat_template) if request.chat_template else own_template(folder)
        )
    except OSError as error:
        raise SpecError(
            f"{_PARAM}: the base's chat template cannot be read: {error.strerror}.", param=_PARAM
        ) from None
    if template is None:
        raise SpecError(
            f"{_PARAM}: the base has no chat template, or several. Give the one to set them in as "
            "chat_template.",
            param=_PARAM,
        )
    return request.model_copy(
        update={"chat_template": with_variables(template, request.chat_template_kwargs)}
    )
