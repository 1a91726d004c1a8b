"""Whatever a rank does wrong ends in one clear error on every rank, and nothing hangs."""

import pytest
from processes import start_ranks

EVERYONE = [
    (
        "another shape on rank 1",
        r"ValueError: dimension 2 of query must be the same on every rank of the mesh, got [8, 10]",
    ),
    ("another window on rank 1", "ValueError: window must be the same on every rank of the mesh, got [3, 4]"),
    ("another scale on rank 1", "ValueError: scale must be the same on every rank of the mesh, got [0.5, 1.5]"),
    ("another transform on rank 1", "ValueError: logits (a checksum of class, settings and parameters, here of"),
    ("another lengthscale on rank 1", "here of ScaleInvariant) must be the same on every rank of the mesh"),
    ("another parameter on rank 1", "here of LogN) must be the same on every rank of the mesh"),
    (
        "another dtype on rank 1",
        "query's dtype must be the same on every rank of the mesh, got [torch.float32, torch.bf",
    ),
    ("another function on rank 1", "ValueError: all ranks of the mesh must call the same function"),
    ("differentiated twice", "RuntimeError: trying to differentiate twice"),
    ("a part of another length on rank 1", "ValueError: dimension 2 must be the same on every rank of the mesh"),
    ("two dimensions", "ValueError: mesh must have one dimension, got 2"),
]
ALONE = [("rank 1 dies", 9), ("rank 1 is missing", 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "message"), EVERYONE, ids=[name for name, _ in EVERYONE])
def test_every_rank_is_told_what_differs(scenario: str, message: str, tmp_path) -> None:
    for code, output in start_ranks("failure_worker.py", 2, tmp_path, scenario):
        assert code == 2, output
        assert message in output


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["documents of two integer types", "no tokens"])
def test_odd_but_right(scenario: str, tmp_path) -> None:
    for code, output in start_ranks("failure_worker.py", 2, tmp_path, scenario):
        assert code == 0, output


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "code"), ALONE, ids=[name for name, _ in ALONE])
def test_a_lost_rank_is_noticed(scenario: str, code: int, tmp_path) -> None:
    (left, output), (lost, _) = start_ranks("failure_worker.py", 2, tmp_path, scenario)
    assert lost == code
    assert left == 2, output
    assert "RankLost: rank 0 of the context mesh lost another rank" in output
