from tests.support.databases import (
    database_url,
    emptied_postgres_url,
    migrated_postgres_url,
    postgres_url,
    store,
    store_url,
)

__all__ = [
    "database_url",
    "emptied_postgres_url",
    "migrated_postgres_url",
    "postgres_url",
    "store",
    "store_url",
]
