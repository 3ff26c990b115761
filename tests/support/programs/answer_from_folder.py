"""Print what the folder that is named last holds as `answer`: in place of the interpreter of the
worker's image.
"""

import sys
from pathlib import Path

print(Path(sys.argv[-1], "answer").read_text(), flush=True)
