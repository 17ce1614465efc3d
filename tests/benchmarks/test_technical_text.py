"""Tests of the corpus of technical text."""

import hashlib

from benchmarks import technical_text


def test_documents_are_distinct_texts_in_the_order_of_their_hashes(tmp_path):
    packages = {name: tmp_path / name for name in ("a 1.0", "b 2.0")}
    files = {
        "a 1.0/code/one.py": b"print(1)\n",
        "a 1.0/code/empty.py": b"\n",
        "a 1.0/code/picture.png": b"\x89PNG",
        "a 1.0/doc/_sources/page.rst.txt": b"Page\n====\n",
        "b 2.0/deep/copy.py": b"print(1)\n",
        "b 2.0/latin.pod": "=head1 caf\xe9\n".encode("latin-1"),
        "b 2.0/text.pod": b"=head1 NAME\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "b 2.0/link.py").symlink_to(tmp_path / "a 1.0/code/one.py")

    technical_text.write_documents(tmp_path / "out", packages)

    kept = ["a 1.0/code/one.py", "a 1.0/doc/_sources/page.rst.txt", "b 2.0/text.pod"]
    expected = sorted(
        [
            hashlib.sha256(files[name]).hexdigest(),
            str(len(files[name])),
            *name.split("/", maxsplit=1),
        ]
        for name in kept
    )
    lines = (tmp_path / "out/manifest").read_text().splitlines()
    assert [line.split("\t") for line in lines] == expected
    texts = sorted((tmp_path / "out/text").iterdir())
    assert [path.name for path in texts] == [f"{row[0][:16]}.txt" for row in expected]
    assert [hashlib.sha256(path.read_bytes()).hexdigest() for path in texts] == [
        row[0] for row in expected
    ]
