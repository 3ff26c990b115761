from tests.ft_service.cli.conftest import ft, home

__all__ = ["ft", "home"]
