"""The YAML of SPEC files, of options on the command line, of the page's form, and of files that
settings name.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from ft_service.errors import SpecError

_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


class StrictLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which rejects duplicate keys, of which PyYAML keeps the last
    silently, and reads ranges and times such as `2:8` as text, which YAML 1.1 reads as a number
    in base 60.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value} is given twice: keep one", key.start_mark
                )
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        """Return the tag of a node without one."""
        tag = super().resolve(kind, value, implicit)
        return self.DEFAULT_SCALAR_TAG if tag in _NUMBERS and ":" in value else tag


def read_yaml_setting(setting: str, path: Path) -> Any:
    """Read the YAML file that a setting such as FT_POD_PROFILE names.

    Raises SpecError that names both if it cannot.
    """
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"{setting} = {path}: {error}", param=setting) from None
