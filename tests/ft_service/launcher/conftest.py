from tests.support.databases import emptied_postgres_url, migrated_postgres_url, postgres_url

__all__ = ["emptied_postgres_url", "migrated_postgres_url", "postgres_url"]
