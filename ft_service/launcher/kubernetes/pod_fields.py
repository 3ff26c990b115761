"""Check of Kubernetes objects in a pod profile against the types of the client, which would leave
out what it does not know.

Needs the client's package, of which only the types of objects are imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, get_args, get_type_hints

from lightkube.models import core_v1
from lightkube.models.core_v1 import PodSpec

# msgspec builds what it knows of a type at its first use, and two threads may not do so at once.
# One thread does so for a pod's types, on import, before any other code uses them.
PodSpec.from_dict({"containers": []})


def fault_of(path: str, kind: str, given: object) -> str | None:
    """Return what is wrong with an object, or a list of objects, of a type of Kubernetes' core API,
    with the path of its field below `path`; None: nothing is. A value that the API server would
    refuse may pass.
    """
    model = getattr(core_v1, kind)
    unknown = next(_unknown(path, given, model), None)
    return unknown or _mistyped(path, given, model)


def _unknown(path: str, given: object, hint: Any) -> Iterator[str]:
    """Yield a sentence for each field that the type lacks.

    `hint`: the type of `given`, or of its items.
    """
    if isinstance(given, list):
        for number, item in enumerate(given):
            yield from _unknown(f"{path}[{number}]", item, hint)
    model = _model_in(hint)
    if not isinstance(given, Mapping) or model is None:
        return
    fields = _fields_of(model)
    for name, value in given.items():
        if name in fields:
            yield from _unknown(f"{path}.{name}", value, fields[name])
            continue
        close = get_close_matches(str(name), fields, n=1)
        hint_of = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(fields))}."
        yield f"{path}.{name}: Kubernetes' {model.__name__} has no such field; {hint_of}"


def _mistyped(path: str, given: object, model: Any) -> str | None:
    """Return what the client says of the first value that it cannot take; None: it takes all."""
    items = (
        [(f"{path}[{number}]", item) for number, item in enumerate(given)]
        if isinstance(given, list)
        else [(path, given)]
    )
    for place, item in items:
        try:
            model.from_dict(item)
        except ValueError as error:
            said, _, at = str(error).partition(" - at ")
            return f"{place}{at.strip('`').removeprefix('$')}: {said}."
    return None


@cache
def _fields_of(model: Any) -> dict[str, Any]:
    """Return the fields of a type by their names in a manifest, with their types."""
    hints = get_type_hints(model)
    return {
        name: hints[own]
        for own, name in zip(model.__struct_fields__, model.__struct_encode_fields__, strict=True)
    }


def _model_in(hint: Any) -> Any:
    """Return the type of the objects that a field holds, itself or in a list; None: it holds other
    values, or any.
    """
    if hasattr(hint, "__struct_fields__"):
        return hint
    return next((model for part in get_args(hint) if (model := _model_in(part)) is not None), None)
