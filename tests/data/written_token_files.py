"""Files of tokens, as we and others write them."""

import struct

import numpy as np

from holmesjax.data import token_files

DOCUMENTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def write_megatron(path, documents, dtype="<u2", code=8, *, cut=()):
    """A file as Megatron writes it; `cut`: sequences that go on in the next one."""
    lengths = [len(document) for document in documents]
    offsets = np.dtype(dtype).itemsize * (np.cumsum(lengths) - lengths)
    entries = [i for i in range(len(documents) + 1) if i - 1 not in cut]
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(documents), len(entries))
    lists = zip((lengths, offsets, entries), ("<i4", "<i8", "<i8"), strict=True)
    content = head + b"".join(np.array(numbers, kind).tobytes() for numbers, kind in lists)
    path.with_suffix(".idx").write_bytes(content)
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    return path


def write_own(path, texts, dtype="uint16", **said):
    tokens_T = np.concatenate(texts).astype(token_files.DTYPES[dtype])
    lengths = [len(text) for text in texts]
    starts_D = (np.cumsum(lengths) - lengths).astype("<i8")
    path.write_bytes(tokens_T.tobytes())
    path.with_suffix(".starts").write_bytes(starts_D.tobytes())
    known = {"dtype": dtype, "tokens": len(tokens_T), "documents": len(texts)}
    known |= {"largest": int(tokens_T.max()), "tokenizer": "bytes"}
    known |= {"sha256": token_files.hash_of(path)}
    known |= {"starts_sha256": token_files.hash_of(path.with_suffix(".starts"))}
    path.with_suffix(".json").write_text(token_files.as_json(known | said))
    return path


STREAM = [token for document in DOCUMENTS for token in document]


def write_numpy(path, documents=()):
    np.save(path.with_suffix(".npy"), np.array(STREAM, np.int32))
    return path.with_suffix(".npy")


def overwrite(suffix, at, value):
    def change(path):
        with path.with_suffix(suffix).open("r+b") as file:
            file.seek(at)
            file.write(value)

    return change
