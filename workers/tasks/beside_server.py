"""An export beside a server: `python -m workers.tasks.beside_server PARENT …`, and behind it as `workers.tasks.export`.

It ends with the server, from its first moment on, however that ends; and lets training have the processors first.
"""

from __future__ import annotations

import os
import sys

from ft_service.host.lifetime import die_with_parent

_NICE = 10


def main(arguments: list[str]) -> int:
    """The exit code of the export."""
    die_with_parent(int(arguments[0]))  # before torch is imported, which takes seconds
    os.nice(_NICE)
    from workers.tasks import export

    return export.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
