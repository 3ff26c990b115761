"""Makes the sample model and the sample data below this folder.

Usage:
    python examples/make_sample.py               # both; trains the base for some minutes
    python examples/make_sample.py --data-only   # the data alone, the same each time: texts byte
    # for byte, pictures pixel for pixel
    python -m workers.describe examples/models/tiny-llama > examples/descriptions/tiny-llama.json
    # after a new base
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sample_gauges import write_gauges
from sample_sums import write_sums
from sample_task import make_splits, write_splits
from sample_turns import write_turns

SEED = 2024


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="DIR")
    parser.add_argument("--data-only", action="store_true", help="leave the model alone")
    options = parser.parse_args()
    splits = make_splits(SEED)
    write_splits(options.out / "data", splits)
    write_sums(options.out / "data", SEED)
    write_gauges(options.out / "data", SEED)
    write_turns(options.out / "data", SEED)
    if options.data_only:
        return
    # Imported late: the data need neither torch nor transformers, and load in no time without.
    from sample_model import make_model, pretrain, train_tokenizer, write_model

    tokenizer = train_tokenizer(SEED, splits["train"])
    model = make_model(SEED, len(tokenizer))
    pretrain(model, tokenizer, SEED)
    write_model(options.out / "models" / "tiny-llama", model, tokenizer)


if __name__ == "__main__":
    main()
