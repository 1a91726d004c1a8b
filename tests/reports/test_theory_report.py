"""The report of the theory: every file is written, and settings do not mix."""

from pathlib import Path

import pytest

from scaleinv.reports import theory_report

pytest.importorskip("matplotlib")


@pytest.mark.slow
def test_report_writes_everything_and_can_be_stopped(tmp_path: Path) -> None:
    lines: list[str] = []
    paths = theory_report(tmp_path / "all", lines.append, longest=2**14, samples=20)
    assert all(path.stat().st_size > 0 for path in paths)
    names = {path.name for path in paths}
    for stem in ("figure1-gaussian", "figure2", "figure6"):
        assert {f"{stem}.{kind}" for kind in ("csv", "json", "png", "svg")} <= names
    assert {"definitions.csv", "definitions.json"} <= names
    assert any("figure 1" in line for line in lines)

    def stop(line: str) -> None:
        if line.startswith("figure6"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        theory_report(tmp_path / "some", stop, longest=2**14, samples=20)
    assert (tmp_path / "some" / "figure2.csv").exists()
    assert (tmp_path / "some" / "figure2.png").exists()


def test_other_settings_do_not_write_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text('{"longest": 16384, "samples": 20, "seed": 1}')
    held = "holds results of longest 16384, samples 20, seed 1, but these are of longest 16384, samples 20, seed 0"
    with pytest.raises(ValueError, match=held):
        theory_report(tmp_path, longest=2**14, samples=20)
    assert {path.name for path in tmp_path.iterdir()} == {"theory.json"}


def test_a_damaged_claim_is_named(tmp_path: Path) -> None:
    (tmp_path / "theory.json").write_text('{"longest": ')
    with pytest.raises(ValueError, match=r"theory\.json is not JSON.*; choose another folder"):
        theory_report(tmp_path, longest=2**14, samples=20)
