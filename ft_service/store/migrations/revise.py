"""Write the revision that brings a database from the newest schema of `versions/` to that of the
tables.

    python -m ft_service.store.migrations.revise NAME "What it does."

It compares the tables of the code with a new SQLite database at the newest revision, and writes a
module of the next number there. Read what it has written: a column that was renamed looks to it
like one that was dropped and another that was added.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

from alembic.autogenerate import produce_migrations, render_python_code
from alembic.operations.ops import UpgradeOps
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from ft_service.store.database import StorableJson, StorableText
from ft_service.store.sql import alembic_config, migrate
from ft_service.store.tables import metadata

VERSIONS = Path(__file__).parent / "versions"
_FILE = '''"""{what}"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = {revision!r}
down_revision = {before!r}


def upgrade() -> None:
{code}
'''
_PLAIN = {StorableText: "sa.Text()", StorableJson: "sa.JSON()"}
"""What a revision calls our types: revisions must not change with the code."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the revision that the tables need.")
    parser.add_argument("name", help="of the file, such as job_priorities")
    parser.add_argument("what", help="a sentence on what it does")
    options = parser.parse_args()
    newest = ScriptDirectory.from_config(alembic_config()).get_current_head()
    revision = f"{int(newest or 0) + 1:04}"
    path = VERSIONS / f"{revision}_{options.name}.py"
    path.write_text(
        _FILE.format(what=options.what, revision=revision, before=newest, code=_code(newest)),
        encoding="utf-8",
    )
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--quiet", str(path)],
        check=True,
        env=dict(os.environ),
    )
    print(path)


def _code(newest: str | None) -> str:
    """Python for what a database at the newest revision lacks.

    Raises SystemExit if that is nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/ft.db"
        if newest is not None:
            migrate(url)
        engine = create_engine(url)
        with engine.connect() as connection:
            compare = {"compare_type": True, "compare_server_default": True}
            context = MigrationContext.configure(
                connection, opts={**compare, "render_item": _render}
            )
            changes = produce_migrations(context, metadata).upgrade_ops
        engine.dispose()
    if not isinstance(changes, UpgradeOps) or changes.is_empty():
        raise SystemExit("The tables are those of the newest revision: there is nothing to do.")
    code = render_python_code(changes, render_item=_render, migration_context=context)
    # Alembic's remarks.
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("# ###"))


def _render(kind: str, item: Any, _: Any) -> str | Literal[False]:
    """Our types as plain ones; False: as Alembic renders it."""
    return _PLAIN.get(type(item), False) if kind == "type" else False


if __name__ == "__main__":
    main()
