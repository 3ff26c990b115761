"""One fine-tuning job from upload to adapter, on this machine: what `make quickstart` runs.

It starts a server for itself, talks to it with the `openai` client, and stops it again. Ctrl-C pauses the job at a checkpoint;
the next run continues from there.
"""

from __future__ import annotations

import sys


def main() -> int:
    """Run the quickstart; the exit code."""
    print("ft-service quickstart: fine-tune a small sample model on this machine. Ctrl-C pauses.\n", flush=True)
    try:
        from quickstart_flow import main as run  # takes a second or two: the first line should not wait for it
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
