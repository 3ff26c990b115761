"""Tables larger than what reading them may take of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

ROWS = 500
BYTES = 20_000
"""Of a part of the table, and of the two messages in a row of it."""
PARTS = 105
MOST = 150_000_000
"""Bytes that reading may take besides what reading a small table takes."""
READ = """
import sys
from pathlib import Path
from ft_service.data.formats.reading import open_data
from ft_service.data.sample_kinds import Record

def peak():
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])

peaks = []
for path, rows in zip(sys.argv[1::2], map(int, sys.argv[2::2]), strict=True):
    with open_data(Path(path)) as reader:
        numbers = [number for number, record in reader if isinstance(record, Record)]
    assert numbers == list(range(1, rows + 1)), len(numbers)
    peaks.append(peak())
print(peaks[-1] - peaks[0])
"""


def chats() -> pa.Table:
    one = [
        [
            {"role": "user", "content": f"{row} " + "q" * BYTES},
            {"role": "assistant", "content": "a"},
        ]
        for row in range(ROWS)
    ]
    return pa.table({"messages": one, "source": ["web"] * ROWS})


@pytest.mark.slow
@pytest.mark.parametrize("groups", ["many row groups", "one row group"])
def test_a_gigabyte_of_parquet_is_read_in_bounded_memory(groups: str, tmp_path: Path) -> None:
    part = chats()
    small = tmp_path / "small.parquet"
    large = tmp_path / "large.parquet"
    plain = {"compression": "none", "use_dictionary": False}
    parquet.write_table(part, small, **plain)
    try:
        if groups == "many row groups":
            with parquet.ParquetWriter(large, part.schema, **plain) as writer:
                for _ in range(PARTS):
                    writer.write_table(part)
        else:
            parquet.write_table(
                pa.concat_tables([part] * PARTS), large, row_group_size=ROWS * PARTS, **plain
            )
        assert large.stat().st_size > 1_000_000_000
        command = [
            sys.executable,
            "-P",
            "-c",
            READ,
            str(small),
            str(ROWS),
            str(large),
            str(ROWS * PARTS),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout) < MOST, (
            f"{int(done.stdout):,} bytes more than for a hundredth of the table"
        )
    finally:
        large.unlink(missing_ok=True)
