"""``benchmarks.gpu`` runs from end to end, here as a dry run that never counts as a result."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu


def test_a_dry_run_measures_everything_and_says_that_it_is_none(tmp_path, capsys):
    assert gpu.main(["--device", "cpu", "--numel", "20000", "--rounds", "2", "--out", str(tmp_path)]) == 0
    assert "DRY RUN on the CPU through the twins: no result" in capsys.readouterr().out
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert report["about"]["dry_run"]
    assert "plain torch" in report["about"]["backend"]
    assert [r["kernel"] for r in report["kernels"]] == [name for name, *_ in gpu.KERNELS]
    for row in report["kernels"]:
        assert row["ms"]["low"] <= row["ms"]["median"] <= row["ms"]["high"]
        assert row["bytes_per_element"] > 0
    assert report["steps"][0]["ratio_to_adamw"] == 1.0
    # AdamW; Lamb; of both 1-bit optimizers the step alone, as one rank of 8, and that rank's kernels; of Marsit's two.
    assert len(report["steps"]) == 2 + 2 * 3 + 2 * 2
    assert (tmp_path / "dry-run.md").read_text().startswith("# DRY RUN")


def test_a_dry_run_is_not_written_to_the_results():
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu", "--numel", "20000", "--out", str(gpu.RESULTS)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_real_run_is_refused(capsys):
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "no CUDA device here" in capsys.readouterr().err
