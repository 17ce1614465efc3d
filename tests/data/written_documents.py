"""The same texts in files of every format."""

import csv
import gzip
import json

import pyarrow as pa
import zstandard
from pyarrow import parquet

TEXTS = [f"Document {i} is of é and → {'x' * (i * 37 % 400)}.\n" for i in range(300)]


TOKENS = [[i, 7 * i % 999, *range(i % 5)] for i in range(300)]


LINES = "".join(json.dumps({"id": i, "text": document}) + "\n" for i, document in enumerate(TEXTS))


def frames(content, size=5000):
    """Several frames, none of which ends where a line does, with one that is skipped."""
    compress = zstandard.ZstdCompressor(write_checksum=True).compress
    skipped = b"\x5e\x2a\x4d\x18\x02\0\0\0ab"
    cut = [content[first : first + size] for first in range(0, len(content), size)]
    return skipped.join(map(compress, cut))


def write_csv(folder):
    with (folder / "a.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text"])
        rows.writerows(enumerate(TEXTS))
    return folder / "a.csv"


def write_jsonl(folder):
    (folder / "a.jsonl").write_text(LINES)
    return folder / "a.jsonl"


def write_jsonl_gz(folder):
    content = LINES.encode()
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(content[:999]) + gzip.compress(content[999:]))
    return folder / "a.jsonl.gz"


def write_jsonl_zst(folder):
    (folder / "a.jsonl.zst").write_bytes(frames(LINES.encode()))
    return folder / "a.jsonl.zst"


def write_parquet(folder, **options):
    table = pa.table({"text": TEXTS, "input_ids": pa.array(TOKENS, pa.list_(pa.int32()))})
    parquet.write_table(table, folder / "a.parquet", row_group_size=70, **options)
    return folder / "a.parquet"
