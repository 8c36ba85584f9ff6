"""Provenance: a page says whether its rows are of one commit."""

from __future__ import annotations

from benchmarks.provenance import NOT_RECORDED, commit, origin


def test_rows_of_one_commit_and_of_several() -> None:
    assert origin(["a1", "a1"]) == "All rows are of commit a1."
    assert origin(["a1", "b2", "b2"], "runs") == "The runs come from several commits: 2 of commit b2, 1 of commit a1."
    assert origin(["", "a1"]) == f"The rows come from several commits: 1 of {NOT_RECORDED}, 1 of commit a1."
    assert "not recorded" in origin([""])


def test_the_commit_is_that_of_this_project() -> None:
    assert commit() == commit()
