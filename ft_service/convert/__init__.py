"""Conversion of other tools' configurations: `convert_file` reads a file and decides on each of its
options.
"""

from ft_service.convert.convert import Conversion, Decision
from ft_service.convert.recognition import convert_file

__all__ = ["Conversion", "Decision", "convert_file"]
