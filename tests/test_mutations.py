"""A sample of tests/mutations.py, and a check that it notices errors."""

import random

import mutations
import pytest

from dynashift import files


def test_no_damage_is_believed_and_none_is_a_traceback():
    found = mutations.run(100, seed=1)
    assert [x for x in found if x[2] in mutations.BAD] == []
    assert len(found) == 100
    assert sum(what in ("refused", "made again") for _, _, what in found) > 60  # the damage was real
    assert len({kind for _, kind, _ in found}) == 14


def test_what_reads_without_a_check_is_found_out(tmp_path):
    """The same mutations against a reader that believes everything."""
    files.write_json(tmp_path / "x.json", {"score": 9.797, "steps": list(range(50))})
    good = (tmp_path / "x.json").read_bytes()
    read = lambda path: path.read_bytes()  # noqa: E731
    damaged = [mutations.mutate(good, random.Random(i)) for i in range(50)]
    verdicts = {mutations.verdict(tmp_path / "x.json", read, mutations.plain(good), x) for x in damaged if x != good}
    assert verdicts == {"silent"}


@pytest.mark.parametrize("error", [KeyError("x"), UnicodeDecodeError("utf-8", b"", 0, 1, "x"), RecursionError()])
def test_any_other_exception_counts_as_a_traceback(tmp_path, error):
    def read(path):
        raise error

    assert mutations.verdict(tmp_path / "x", read, None, b"") == "traceback"
