"""From other tools' configurations to ours: `convert_file` reads one file and says what becomes of every option in it."""

from ft_service.convert.convert import Conversion, Decision, convert_file

__all__ = ["Conversion", "Decision", "convert_file"]
