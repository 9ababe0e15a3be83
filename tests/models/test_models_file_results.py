import os

import pytest

from shoal.core import ModelUnavailable
from shoal.models.folder.file_results import FileResults, digest_of


def counting():
    """A computation that returns how often it was called."""
    calls = []

    def compute():
        calls.append(True)
        return len(calls)

    return compute


def test_equal_files_links_and_copies_share_a_result(tmp_path):
    file, link, copy = (tmp_path / name for name in ("file", "link", "copy"))
    file.write_text("a")
    copy.write_text("a")
    link.symlink_to(file)
    results, compute = FileResults(), counting()
    assert [results.get([each], compute) for each in (file, link, copy, file)] == [1, 1, 1, 1]


def test_a_changed_file_is_computed_again_and_so_are_other_arguments(tmp_path):
    file = tmp_path / "file"
    file.write_text("a")
    results, compute = FileResults(), counting()
    assert results.get([file], compute) == 1
    file.write_text("b")
    os.utime(file, ns=(1, 1))
    assert results.get([file], compute) == 2
    assert results.get([file], compute, "x") == 3
    assert results.get([file, tmp_path / "none"], compute) == 4
    file.unlink()
    assert results.get([file], compute) == 5
    file.write_text("b")
    assert results.get([file], compute) == 2


def test_errors_are_raised_by_each_call(tmp_path):
    results = FileResults()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            results.get([tmp_path / "none"], lambda: 1 // 0)
    assert results.get([tmp_path / "none"], lambda: 3) == 3


def test_a_pipe_is_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert FileResults().get([tmp_path / "pipe"], lambda: 3) == 3


def test_the_digest_of_a_replaced_file_is_another(tmp_path):
    file = tmp_path / "file"
    file.write_text("a")
    before = digest_of(file)
    (tmp_path / "new").write_text("b")
    os.replace(tmp_path / "new", file)
    assert digest_of(file) != before
    file.unlink()
    with pytest.raises(ModelUnavailable, match="cannot be read"):
        digest_of(file)
