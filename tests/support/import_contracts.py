"""A kind of contract for import-linter: which packages some modules may import, everything else
being forbidden.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class AllowedContract(Contract):
    """`importers` import nothing of the linted packages but themselves and `allowed`; of an allowed
    root package only the root.

    A new folder is thus out of bounds until somebody lets it in; a list of what is forbidden would
    have to be kept up.
    """

    type_name = "allowed"

    importers: Any = fields.ListField(subfield=fields.StringField())
    allowed: Any = fields.ListField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        below = [package for package in self.allowed if "." in package]
        linted = [module for module in graph.modules if not graph.is_module_squashed(module)]
        broken = sorted(
            (importer, imported)
            for importer in linted
            if _is_below(importer, self.importers)
            for imported in graph.find_modules_directly_imported_by(importer)
            if not graph.is_module_squashed(imported)
            if not _is_below(imported, self.importers)
            and imported not in self.allowed
            and not _is_below(imported, below)
        )
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for importer, imported in check.metadata["broken"]:
            output.print_error(
                f"{importer} imports {imported}, which is not on its list of what it may import."
            )


def _is_below(module: str, packages: tuple[str, ...] | list[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
